"""Copies from host memory to a role's device for which the host does not wait, and places known on the host.

On CUDA, a copy of pageable memory, a boolean index and ``item()`` make the host wait until the device
has done all its work; then the device waits for the next kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megarl.types import AnyArray

Arrays = Mapping[str, AnyArray]

_ALIGNMENT = 16


def to_device(arrays: Arrays, device: torch.device | int) -> dict[str, Tensor]:
    """Copies arrays to a device in one transfer through pinned memory; on a CPU, tensors of the same memory."""
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    if torch.device(device).type == "cpu":
        return tensors
    buffer = torch.empty(packed_bytes(tensors), dtype=torch.uint8, pin_memory=True)
    for name, part in unpacked(buffer, tensors).items():
        part.copy_(tensors[name])
    # torch keeps the pinned memory until the transfer has ended.
    return unpacked(buffer.to(device, non_blocking=True), tensors)


def packed_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Returns the size of a buffer with all tensors, each of them aligned."""
    return sum(_aligned_bytes(tensor) for tensor in tensors.values())


def unpacked(buffer: Tensor, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns views of a buffer of bytes with the shapes and dtypes of the tensors."""
    views: dict[str, Tensor] = {}
    start = 0
    for name, tensor in tensors.items():
        part = buffer[start : start + tensor.nbytes]
        views[name] = part.view(tensor.dtype).view(tensor.shape)
        start += _aligned_bytes(tensor)
    return views


def _aligned_bytes(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, kw_only=True)
class Places:
    """N rows in a padded order of P places.

    Args:
        position_of: [P] int64, the row at each place; N at padding.
        place_of: [N] int64, the place of each row.
    """

    position_of: Tensor
    place_of: Tensor

    def spread(self, x: Tensor) -> Tensor:
        """[N, ...] -> [P, ...], with zeros as padding."""
        assert len(x) == len(self.place_of), f"{len(x)} rows for {len(self.place_of)} places"
        return _Move.apply(x, self, True)

    def collect(self, x: Tensor) -> Tensor:
        """[P, ...] -> [N, ...], without the padding."""
        return _Move.apply(x, self, False)


class _Move(torch.autograd.Function):
    """Moves rows to their places, or back; as each row has one place, the gradient moves the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Places, to_places: bool) -> Tensor:
        ctx.places = places
        ctx.to_places = to_places
        return _moved(x, places, to_places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _moved(grad, ctx.places, not ctx.to_places), None, None


def _moved(x: Tensor, places: Places, to_places: bool) -> Tensor:
    if to_places:
        padded = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
        return padded.index_select(0, places.position_of)
    return x.contiguous().index_select(0, places.place_of)


def padded_places(lengths: Sequence[int]) -> tuple[Arrays, tuple[int, int]]:
    """Returns the indices of ``Places`` of flat rows of these lengths in [B, R], padded at their ends, and [B, R]."""
    per_row = np.asarray(lengths, dtype=np.int64)
    shape = len(lengths), max(lengths, default=0)
    counts = (np.arange(shape[1]) < per_row[:, None]).ravel()
    position_of = np.where(counts, np.cumsum(counts) - 1, per_row.sum())
    return {"position_of": position_of, "place_of": np.flatnonzero(counts)}, shape
