"""Selections against the oracle's loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algos.selection import best_fraction, best_of_groups, nonzero_std, open_range
from tests.oracle import selection as naive
from tests.oracle.models import Sample

samples = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([-1.0, 0.0, 0.5, 2.0, None])), min_size=1, max_size=12)
"""Prompts and scores, with equal ones and samples without."""


def oracle_samples(pairs: list[tuple[int, float | None]]) -> list[Sample]:
    return [
        Sample(sample_id=str(i), prompt_ids=[0], response_ids=[0], score=score, group=group)
        for i, (group, score) in enumerate(pairs)
    ]


def tensors(pairs: list[tuple[int, float | None]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scores = torch.tensor([float("nan") if score is None else score for _, score in pairs])
    return scores, torch.tensor([group for group, _ in pairs]), scores.isnan()


@given(samples)
def test_best_of_each_prompt_equals_the_oracles(pairs: list[tuple[int, float | None]]) -> None:
    scores, groups, discarded = tensors(pairs)
    best = sorted(naive.best_of_each(oracle_samples(pairs)), key=lambda sample: sample.group)
    assert best_of_groups(scores, groups, discarded).tolist() == [int(sample.sample_id) for sample in best]


@given(samples, st.sampled_from([0.2, 0.5, 1.0]))
def test_best_of_all_equals_the_oracles(pairs: list[tuple[int, float | None]], fraction: float) -> None:
    scores, groups, discarded = tensors(pairs)
    best = naive.best_of_all(oracle_samples(pairs), fraction)
    chosen = best_fraction(scores, groups, discarded, fraction=fraction)
    assert chosen.tolist() == [int(sample.sample_id) for sample in best]


@pytest.mark.parametrize(("scores", "differ"), [([0.1, 0.1, 0.1], False), ([1.0, 1.0 + 1e-6], True)])
def test_a_prompt_is_kept_if_its_scores_differ(scores: list[float], differ: bool) -> None:
    assert nonzero_std(torch.tensor(scores, dtype=torch.float64)) is differ


@given(st.lists(st.integers(-1, 5).map(lambda n: n / 4), min_size=1, max_size=4))
def test_filters_equal_the_oracles(scores: list[float]) -> None:
    assert open_range(torch.tensor(scores)) == naive.between(scores)
    assert open_range(torch.tensor(scores), low=0.5, high=0.75) == naive.between(scores, 0.5, 0.75)
    assert nonzero_std(torch.tensor(scores)) == naive.deviating(scores)
    assert nonzero_std(torch.tensor(scores), tol=0.25) == naive.deviating(scores, 0.25)


def test_bounds_are_compared_in_the_scores_dtype() -> None:
    """0.2 in float32 is a little more than in float64."""
    assert not open_range(torch.full((3,), 0.2), low=0.2)
    assert not open_range(torch.full((3,), 0.7), high=0.7)
