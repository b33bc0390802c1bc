"""Inputs of the algorithm tests."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

NAN = float("nan")

lengths = st.lists(st.integers(0, 6), min_size=1, max_size=5)
"""Response tokens of the rows of a batch."""
masks = st.integers(1, 4).flatmap(
    lambda rows: st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=rows, max_size=rows)
)
"""Masks with gaps and empty rows."""
fractions = st.floats(0, 1)
seeds = st.integers(0, 99)


def numbers(*shape: int, seed: int) -> Tensor:
    """Normal ones, float64."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def lengths_mask(lengths: list[int], width: int) -> Tensor:
    """[B, width] bool."""
    return torch.tensor([[t < n for t in range(width)] for n in lengths], dtype=torch.bool).reshape(len(lengths), width)


def rows_of(values: Tensor, lengths: list[int]) -> list[list[float]]:
    """The rows without their padding."""
    return [row[:n].tolist() for row, n in zip(values, lengths, strict=True)]
