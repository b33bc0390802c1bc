"""The layout of buckets in receive buffers and of frames on the network; their copies and checksums."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

import torch
import xxhash

from megarl.resharding.spec import RecvBufferPlan
from megarl.resharding.sync_barrier import SyncStats
from megarl.weights.plan import Boxed, Bucket, Message
from megarl.weights.shard_map import ITEM_BYTES

_ALIGNMENT = 16
"""Frames and buckets start at multiples of this."""

_SLAB_BYTES = 1 << 20
"""Copied and then hashed at once; fits a core's cache."""

_DEVICE_SLAB_BYTES = 1 << 26
"""The same on CUDA, where the host waits for every slab's sums."""

_ROW_WORDS = 1024
"""Words of 32 bits of which CUDA makes one of 64 bits for the checksum."""


def aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def half_bytes(buffer: RecvBufferPlan) -> int:
    """Returns the size of one bucket in the receive buffer."""
    return aligned(max((bucket.nbytes for bucket in buffer.buckets), default=0))


def recv_buffer_bytes(buffer: RecvBufferPlan) -> int:
    return half_bytes(buffer) * buffer.depth


def bucket_views(memory: torch.Tensor, buffer: RecvBufferPlan, index: int) -> dict[str, torch.Tensor]:
    """Returns the parameters of a bucket (or a part of one) as views of a flat uint8 receive buffer.

    The order is the bucket's; in memory, larger dtypes come first, which wastes no alignment.
    """
    bucket = buffer.buckets[index]
    views: dict[str, torch.Tensor] = dict.fromkeys(bucket.params, memory)
    offset = half_bytes(buffer) * (index % buffer.depth)
    for name in sorted(bucket.params, key=lambda name: -ITEM_BYTES[buffer.params[name].dtype]):
        info = buffer.params[name]
        if bucket.box is not None:
            info = replace(info, shape=bucket.box.shape)
        part = memory[offset : offset + info.nbytes]
        views[name] = part.view(getattr(torch, info.dtype)).view(info.shape)
        offset += info.nbytes
    return views


def recv_views(message: Message, bucket: Bucket, views: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Returns the target of each of a message's copies in a bucket's memory."""
    targets: list[torch.Tensor] = []
    for copy in message.copies:
        box = copy.target_box if bucket.box is None else copy.target_box.relative_to(bucket.box)
        targets.append(views[copy.target][box.slices])
    return targets


def frames_bytes(messages: Iterable[Message]) -> int:
    return sum(aligned(message.nbytes) for message in messages)


def payload(message: Message, frame: torch.Tensor) -> list[torch.Tensor]:
    """Returns each copy's part of a frame, in the target's dtype and extents."""
    parts: list[torch.Tensor] = []
    offset = 0
    for copy in message.copies:
        part = frame[offset : offset + copy.nbytes].view(getattr(torch, copy.dtype))
        parts.append(part.view(copy.target_box.shape))
        offset += copy.nbytes
    return parts


class Checksum:
    """xxh3 of a message: its version, sender, receiver and bucket, then its elements in row-major order.

    On CUDA, of their row sums, so that the host gets a 512th of the bytes; the ranks of a sync have
    one kind of device.
    """

    def __init__(self, message: Message, stats: SyncStats) -> None:
        identity = f"{stats.version} {message.sender} {message.receiver} {message.bucket}"
        self._hash = xxhash.xxh3_64(identity.encode())
        self._stats = stats

    def add(self, values: torch.Tensor) -> None:
        for part in _slabs(values):
            with self._stats.stage("verify"):
                content = part.contiguous().view(-1).view(torch.uint8)
                if content.is_cuda:
                    content = row_sums(content).cpu()
                self._hash.update(content.numpy().data)

    @property
    def value(self) -> int:
        """The checksum so far, as a signed 64-bit number."""
        return int.from_bytes(self._hash.digest(), "big", signed=True)


def row_sums(content: torch.Tensor) -> torch.Tensor:
    """Returns the sum mod 2^64 of every 1024 words of 32 bits, weighted by odd random numbers of 64 bits.

    Every device gets the same. A changed word, or two exchanged ones, always change a row's sum;
    others are missed with a probability of 2^-32 (multilinear hashing, arXiv 1202.4961).

    Args:
        content: bytes, flat; zeros are added to the last row.

    Returns:
        int64, [rows], on the same device.
    """
    missing = -content.numel() % (4 * _ROW_WORDS)
    words = torch.nn.functional.pad(content, (0, missing)).view(torch.int32).view(-1, _ROW_WORDS)
    return (words * _row_weights(content.device)).sum(1)


@cache
def _row_weights(device: torch.device) -> torch.Tensor:
    """Odd, and different in their lower 33 bits, so that exchanged words change a sum."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(-(2**63), 2**63 - 1, (_ROW_WORDS,), generator=generator) | 1).to(device)


def pack(
    message: Message,
    params: Mapping[str, Boxed],
    targets: Sequence[torch.Tensor],
    checksum: Checksum | None,
) -> None:
    """Writes a message's copies to targets in their dtype; a checksum adds what is still cached."""
    for copy, target in zip(message.copies, targets, strict=True):
        box = params[copy.source][copy.source_box.slices]
        source = copy.arranged(box)
        if checksum is None:
            target.copy_(source)
            continue
        for part, values in zip(_slabs(target), _slabs(source, target.element_size()), strict=True):
            part.copy_(values)
            checksum.add(part)


def unpack(message: Message, frame: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    for values, target in zip(payload(message, frame), targets, strict=True):
        target.copy_(values)


def _slabs(values: torch.Tensor, item_bytes: int = 0) -> Iterator[torch.Tensor]:
    """Cuts a tensor, in row-major order, into parts of at most a slab."""
    nbytes = values.numel() * (item_bytes or values.element_size())
    limit = _SLAB_BYTES if values.device.type == "cpu" else _DEVICE_SLAB_BYTES
    if nbytes <= limit or values.numel() == 1:
        yield values
        return
    axis = next(axis for axis, extent in enumerate(values.shape) if extent > 1)
    rows = limit * values.shape[axis] // nbytes
    for part in values.split(max(1, rows), dim=axis):
        if rows:
            yield part
        else:
            yield from _slabs(part, item_bytes)


def named(message: Message) -> str:
    """Names the parameters of a message, for errors."""
    first, *more = dict.fromkeys(copy.target for copy in message.copies)
    return f"{first} and {len(more)} more" if more else first
