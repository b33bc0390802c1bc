"""Buffers of a sync: frames (the payload of a message and its checksum), and the parameters of a bucket."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence

import torch

from megarl.weights.plans import Bucket, Copy, Message
from megarl.weights.regions import TensorInfo

CHECKSUM_BYTES = 4
_ALIGNMENT = 16
"""Frames and parameters start at multiples of this in their buffer."""


def aligned(nbytes: int) -> int:
    """The next multiple of the alignment."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def frame_bytes(message: Message, *, verify: bool) -> int:
    """Bytes of a message on the wire."""
    return message.nbytes + (CHECKSUM_BYTES if verify else 0)


def frames_bytes(messages: Iterable[Message], *, verify: bool) -> int:
    """Buffer space for some messages' frames."""
    return sum(aligned(frame_bytes(message, verify=verify)) for message in messages)


def split_frames(buffer: torch.Tensor, messages: Sequence[Message], *, verify: bool) -> list[torch.Tensor]:
    """Views of a flat uint8 buffer, one per message."""
    frames: list[torch.Tensor] = []
    offset = 0
    for message in messages:
        nbytes = frame_bytes(message, verify=verify)
        frames.append(buffer[offset : offset + nbytes])
        offset += aligned(nbytes)
    return frames


def bucket_views(buffer: torch.Tensor, bucket: Bucket, infos: Mapping[str, TensorInfo]) -> dict[str, torch.Tensor]:
    """Views of a flat uint8 buffer, one per whole parameter of a bucket, with its dtype and shape."""
    views: dict[str, torch.Tensor] = {}
    offset = 0
    for name in bucket.params:
        info = infos[name]
        dtype: torch.dtype = getattr(torch, info.dtype)
        views[name] = buffer[offset : offset + info.nbytes].view(dtype).view(info.shape)
        offset += aligned(info.nbytes)
    return views


def bucket_buffer_bytes(bucket: Bucket, infos: Mapping[str, TensorInfo]) -> int:
    """Buffer space for the whole parameters of a bucket."""
    return sum(aligned(infos[name].nbytes) for name in bucket.params)


def pack(copies: Iterable[Copy], params: Mapping[str, torch.Tensor], frame: torch.Tensor) -> None:
    """Writes the copies' elements, cast to the destination's dtype, one after the other into a frame."""
    for copy, target in zip_payload(copies, frame):
        target.copy_(copy.arranged(params[copy.source].detach()[copy.source_box.slices]))


def unpack(copies: Iterable[Copy], frame: torch.Tensor, params: Mapping[str, torch.Tensor]) -> None:
    """Writes a frame's elements to where they belong in the destination's parameters."""
    for copy, values in zip_payload(copies, frame):
        params[copy.target][copy.target_box.slices] = values


def zip_payload(copies: Iterable[Copy], frame: torch.Tensor) -> Iterable[tuple[Copy, torch.Tensor]]:
    """Each copy with its part of the frame, in the destination's dtype and extents."""
    offset = 0
    for copy in copies:
        dtype: torch.dtype = getattr(torch, copy.dtype)
        yield copy, frame[offset : offset + copy.nbytes].view(dtype).view(copy.target_box.shape)
        offset += copy.nbytes


def seal(frame: torch.Tensor, message: Message, version: int) -> None:
    """Writes a checksum to the end of a packed frame: of the payload, and of whose it is in which version."""
    checksum = _checksum(frame, message, version).to_bytes(CHECKSUM_BYTES, "little")
    frame[-CHECKSUM_BYTES:] = torch.tensor(list(checksum), dtype=torch.uint8)


def is_intact(frame: torch.Tensor, message: Message, version: int) -> bool:
    """Whether a received frame is what was packed for this message in this version."""
    stated = int.from_bytes(frame[-CHECKSUM_BYTES:].numpy().tobytes(), "little")
    return _checksum(frame, message, version) == stated


def _checksum(frame: torch.Tensor, message: Message, version: int) -> int:
    identity = f"{version} {message.sender} {message.receiver} {message.bucket}".encode()
    return zlib.crc32(frame[:-CHECKSUM_BYTES].numpy().data, zlib.crc32(identity))
