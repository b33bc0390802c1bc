"""Moments and normalisers: against naive loops, over ranks of any sizes."""

from __future__ import annotations

import math
import statistics
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megarl.algos.normalization import (
    Groups,
    Level,
    Reduce,
    grouped_tokens,
    levels,
    masked_moments,
    whiten_advantages,
    whiten_rewards,
)
from tests.algos.inputs import NAN, lengths_mask, local, numbers, on_ranks, rows_of, seeds
from tests.oracle import normalisation as naive

ranks_of_rows = st.lists(st.lists(st.integers(0, 6), max_size=4), min_size=1, max_size=3)
"""Lengths of the rows of each rank: ranks without rows, or without tokens, take part."""


class Batch:
    """Rows far from 0, with NaN padding, in groups that are spread over the ranks."""

    def __init__(self, ranks: list[list[int]], seed: int, groups: int = 2) -> None:
        self.ranks, self.groups = ranks, groups
        self.values = [numbers(len(r), 6, seed=seed + i) + 100.0 for i, r in enumerate(ranks)]
        self.masks = [lengths_mask(r, 6) for r in ranks]
        count = sum(map(len, ranks))
        self.index = torch.arange(count) % groups
        self.shards = [
            (torch.where(m, v, NAN), m, Groups(index=index, count=groups))
            for v, m, index in zip(self.values, self.masks, self.index.split([len(r) for r in ranks]), strict=True)
        ]

    @property
    def rows(self) -> list[list[float]]:
        return [row for v, r in zip(self.values, self.ranks, strict=True) for row in rows_of(v, r)]

    def check(self, results: list[Tensor], expected: Any) -> None:
        ours = [row for v, r in zip(results, self.ranks, strict=True) for row in rows_of(v, r)]
        for one, other in zip(ours, expected, strict=True):
            assert one == pytest.approx(other, abs=1e-8)
        for result, mask in zip(results, self.masks, strict=True):
            assert not result[~mask].any()


@given(
    ranks_of_rows.filter(lambda ranks: sum(map(sum, ranks)) > 1),
    seeds,
    st.sampled_from([0, 1]),
    st.sampled_from(["var_plus_eps", "var_clamp", "std_plus_eps"]),
    st.booleans(),
)
def test_whitening_uses_the_rows_of_all_ranks(
    ranks: list[list[int]], seed: int, ddof: Any, form: Any, mean_only: bool
) -> None:
    batch = Batch(ranks, seed)
    options = {"ddof": ddof, "form": form, "mean_only": mean_only, "eps": 1e-4}

    def ours(values: Tensor, mask: Tensor, groups: Groups, reduce: Reduce) -> Tensor:
        return whiten_advantages(values, mask, groups, reduce, **options)

    batch.check(on_ranks(ours, batch.shards), naive.whiten(batch.rows, **options))


@given(ranks_of_rows.filter(lambda ranks: sum(map(sum, ranks)) > 1), seeds)
def test_rewards_get_a_variance_of_one_around_their_mean(ranks: list[list[int]], seed: int) -> None:
    batch = Batch(ranks, seed)
    shards = [(values, mask) for values, mask, _ in batch.shards]
    batch.check(on_ranks(whiten_rewards, shards), naive.whiten(batch.rows, keep_mean=True))


@given(ranks_of_rows.filter(lambda ranks: sum(map(sum, ranks)) > 1), seeds, st.sampled_from([1, 2]))
def test_tokens_are_whitened_by_group(ranks: list[list[int]], seed: int, groups: int) -> None:
    batch = Batch(ranks, seed, groups)
    results = on_ranks(grouped_tokens, batch.shards)
    if all(any(row for row, g in zip(batch.rows, batch.index, strict=True) if g == i) for i in range(groups)):
        batch.check(results, naive.grouped_tokens(batch.rows, batch.index.tolist()))


def entry(row: int, t: int, rows: list[list[float]], groups: list[int], mean: Level | None, loo: bool) -> float:
    """One token minus the mean of its level, or of the other tokens there."""
    if mean is None:
        return rows[row][t]
    there = [
        x
        for i, other in enumerate(rows)
        if mean == "batch" or groups[i] == groups[row]
        for u, x in enumerate(other)
        if not (loo and (i, u) == (row, t))
    ]
    return rows[row][t] - statistics.fmean(there) if there else rows[row][t]


@given(
    ranks_of_rows.filter(lambda ranks: sum(map(sum, ranks)) > 1),
    seeds,
    st.sampled_from(["batch", "group", None]),
    st.sampled_from(["batch", "group", None]),
    st.booleans(),
    st.booleans(),
)
def test_levels_equal_a_loop_over_tokens(
    ranks: list[list[int]], seed: int, mean: Level | None, std: Level | None, loo: bool, unbiased: bool
) -> None:
    batch = Batch(ranks, seed)
    rows, groups = batch.rows, batch.index.tolist()
    centred = [[entry(i, t, rows, groups, mean, loo) for t in range(len(row))] for i, row in enumerate(rows)]

    def scale(row: int) -> float:
        squares = [x**2 for i, r in enumerate(centred) if std == "batch" or groups[i] == groups[row] for x in r]
        alone = unbiased and len(squares) == 1
        return (1.0 if alone else math.sqrt(sum(squares) / max(len(squares) - unbiased, 1))) + 1e-5

    expected = [[x / (1.0 if std is None else scale(i)) for x in row] for i, row in enumerate(centred)]

    def ours(values: Tensor, mask: Tensor, groups: Groups, reduce: Reduce) -> Tensor:
        return levels(values, mask, groups, reduce, mean=mean, std=std, leave_one_out=loo, unbiased=unbiased)

    batch.check(on_ranks(ours, batch.shards), expected)


def test_a_single_token_of_a_group_is_not_divided() -> None:
    """It has no unbiased deviation to be divided by; dividing by its own size would make it +-1."""
    values, mask = torch.tensor([[4.0, 0.0], [-2.0, 3.0]]).double(), torch.tensor([[1, 0], [1, 1]]).bool()
    groups = Groups(index=torch.tensor([0, 1]), count=2)
    own = levels(values, mask, groups, local, mean=None, std="group", eps=0.0)
    assert own[0].tolist() == [4.0, 0.0]
    assert own[1].tolist() == pytest.approx([-2.0 / math.sqrt(13.0), 3.0 / math.sqrt(13.0)])
    others = levels(values, mask, groups, local, mean="group", std="group", leave_one_out=True, eps=0.0)
    assert others[0].tolist() == [4.0, 0.0]


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("form", ["var_plus_eps", "var_clamp", "std_plus_eps"])
def test_constants_and_single_tokens_become_zero(ddof: Literal[0, 1], form: Any) -> None:
    for shape in ((2, 3), (1, 1)):
        mask = torch.ones(shape).bool()
        groups = Groups(index=torch.zeros(shape[0]).long(), count=1)
        constant = torch.full(shape, 7.0)
        assert not whiten_advantages(constant, mask, groups, local, ddof=ddof, form=form).any()
        assert not grouped_tokens(constant, mask, groups, local, ddof=ddof).any()
        assert not levels(constant, mask, groups, local).any()


def test_without_unmasked_tokens_the_result_is_zero() -> None:
    mask, groups = torch.zeros(2, 3).bool(), Groups(index=torch.tensor([0, 1]), count=2)
    nothing = torch.full((2, 3), NAN)
    assert not whiten_advantages(nothing, mask, groups, local).any()
    assert not grouped_tokens(nothing, mask, groups, local).any()
    assert not levels(nothing, mask, groups, local, mean="group").any()
    assert not whiten_rewards(nothing, mask, local).any()


# ---- pitfalls


def test_p13_every_rank_calls_every_reduction_whether_it_has_tokens_or_not() -> None:
    """A rank without tokens that skips the reduction makes the others hang."""
    full = (numbers(2, 3, seed=0), torch.ones(2, 3).bool())
    none = (torch.zeros(0, 0), torch.zeros(0, 0).bool())
    empty = (torch.zeros(1, 3), torch.zeros(1, 3).bool())
    for shards in ([full, none], [empty, full], [none, empty, full]):
        for moments in on_ranks(masked_moments, shards):
            assert moments.count.item() == 6
        indexed = [(*shard, Groups(index=torch.zeros(len(shard[0])).long(), count=3)) for shard in shards]
        for normalise in (whiten_advantages, grouped_tokens, levels):
            results = on_ranks(normalise, indexed)
            assert [len(result) for result in results] == [len(shard[0]) for shard in shards]


def test_p14_the_variance_is_stable_under_a_large_mean() -> None:
    """In one pass, as mean of squares minus squared mean, float32 gives 0 or less here."""
    values = torch.tensor([4096.0, 4096.5, 4097.0])
    moments = masked_moments(values, torch.ones(3).bool(), local)
    assert moments.variance.item() == pytest.approx(1 / 6, rel=1e-12)
