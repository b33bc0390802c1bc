"""Between flat response tokens, as packs have them, and the response-aligned [B, R] tensors of the algorithms.

Shape legend: B rows, R response tokens of the longest row, T response tokens of all rows one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def response_mask(lengths: Sequence[int] | Tensor, device: torch.device | str = "cpu") -> Tensor:
    """[B, R] bool, True on the first ``lengths[i]`` columns of row i; [0, 0] without rows."""
    per_row = torch.as_tensor(lengths, dtype=torch.int64, device=device)
    width = int(per_row.max()) if len(per_row) else 0
    return torch.arange(width, device=device) < per_row[:, None]


def align(flat: Tensor, mask: Tensor) -> Tensor:
    """[B, R] of the flat values, 0 off the mask; gradients flow back to ``flat``.

    Args:
        flat: [T], T the True entries of the mask.
        mask: [B, R] bool.
    """
    assert len(flat) == int(mask.sum()), f"{len(flat)} values for {int(mask.sum())} response tokens"
    return flat.new_zeros(mask.shape).masked_scatter(mask, flat)


def flatten(aligned: Tensor, mask: Tensor) -> Tensor:
    """[T] of the [B, R] values on the mask, row after row: the inverse of align."""
    return aligned[mask]
