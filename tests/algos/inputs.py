"""Inputs of the algorithm tests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from megarl.algos.normalization import Reduce

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


def local(vector: Tensor) -> Tensor:
    """The reduction of one rank."""
    return vector


def on_ranks(function: Callable[..., Any], per_rank: list[tuple[Any, ...]]) -> list[Any]:
    """Results of ``function(*arguments, reduce)`` on ranks that are threads; leaving out a reduction breaks it."""
    vectors: list[Tensor | None] = [None] * len(per_rank)
    meet = threading.Barrier(len(per_rank), timeout=60)

    def rank(index: int) -> Any:
        def reduce(vector: Tensor) -> Tensor:
            vectors[index] = vector
            meet.wait()
            total = torch.stack([v for v in vectors if v is not None]).sum(0)
            meet.wait()
            return total

        try:
            return function(*per_rank[index], reduce)
        except Exception:
            meet.abort()
            raise

    with ThreadPoolExecutor(len(per_rank)) as pool:
        return list(pool.map(rank, range(len(per_rank))))


def measured_on_ranks(measure: Callable[[slice, Reduce], Any]) -> Any:
    """What one rank measures of four rows, as several ranks that share them must do."""
    whole = measure(slice(0, 4), local)
    for split in ([slice(0, 1), slice(1, 4)], [slice(0, 4), slice(0, 0)]):
        for own in on_ranks(measure, [(rows,) for rows in split]):
            assert own == pytest.approx(whole)
    return whole
