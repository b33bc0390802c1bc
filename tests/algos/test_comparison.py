"""What comes of comparing: the samples of a prompt, the responses of a pair, the scores of reference samples."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megarl.algos.advantages import grpo, per_token
from megarl.algos.metrics import group_metrics
from megarl.algos.preference import pairwise
from megarl.algos.rewards import normalise_scores, score_scale, shape_scores
from tests.oracle import comparisons as oracle
from tests.oracle.models import Sample

scored = st.lists(st.tuples(st.integers(0, 3), st.floats(-100, 100)), min_size=1, max_size=12)


def numbered(pairs: list[tuple[int, float]]) -> tuple[Tensor, Tensor]:
    """Scores and groups, whose numbers have no gap."""
    names = sorted({group for group, _ in pairs})
    groups = torch.tensor([names.index(group) for group, _ in pairs])
    return torch.tensor([score for _, score in pairs], dtype=torch.float64), groups


@given(scored)
def test_advantages_are_those_of_the_oracle_whatever_the_order(pairs: list[tuple[int, float]]) -> None:
    scores, groups = numbered(pairs)
    samples = [
        Sample(sample_id=str(i), prompt_ids=[0], response_ids=[0], score=score, group=group)
        for i, (group, score) in enumerate(pairs)
    ]
    expected = oracle.grpo(samples, [score for _, score in pairs])
    assert grpo(scores, groups).tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)
    order = random.Random(0).sample(range(len(pairs)), len(pairs))
    assert grpo(scores[order], groups[order]).tolist() == pytest.approx(
        [expected[i] for i in order], rel=1e-6, abs=1e-6
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_scores_and_single_samples_have_no_advantage_at_all(dtype: torch.dtype) -> None:
    scores = torch.tensor([0.1] * 7 + [5.0], dtype=dtype)
    assert grpo(scores, torch.tensor([0] * 7 + [1])).tolist() == [0.0] * 8


def test_a_shift_of_the_scores_changes_nothing_and_a_scale_little() -> None:
    scores, groups = torch.tensor([1.0, 2.0, 4.0, 0.0, 9.0]), torch.tensor([1, 0, 1, 0, 1])
    advantages = grpo(scores, groups)
    torch.testing.assert_close(grpo(scores + 7, groups), advantages)
    torch.testing.assert_close(grpo(scores * 3, groups), advantages, rtol=1e-5, atol=1e-5)


def test_an_advantage_stands_on_every_token_that_counts() -> None:
    mask = torch.tensor([[True, False, True], [False] * 3, [True] * 3])
    spread = per_token(torch.tensor([2.0, 3.0, -1.0]), mask)
    assert spread.tolist() == [[2, 0, 2], [0, 0, 0], [-1, -1, -1]]


def test_group_metrics_by_hand() -> None:
    scores = torch.tensor([1.0, 0.5, 5.0, 0.5, 7.0])
    metrics = group_metrics(scores, torch.tensor([0, 1, 0, 1, 2]))
    assert metrics == pytest.approx({"group/std_mean": 2 / 3, "group/zero_std_fraction": 2 / 3})


# ---- pairs


def test_a_pair_by_hand() -> None:
    loss = pairwise(torch.tensor([1.0, 0.5]), torch.tensor([0.0, 0.5]), centering=0.1)
    expected = [math.log(1 + math.exp(-1)) + 0.1, math.log(2) + 0.1]
    assert loss.values.tolist() == pytest.approx(expected)
    assert {name: values.tolist() for name, values in loss.metrics.items()} == {
        "accuracy": [1.0, 0.0],
        "margin": [1.0, 0.0],
        "chosen": [1.0, 0.5],
        "rejected": [0.0, 0.5],
    }


def test_the_gradient_of_a_pair_agrees_with_finite_differences_and_is_finite_far_out() -> None:
    chosen, rejected = (
        torch.tensor([0.3, -2.0, 100.0, -100.0]).double(),
        torch.tensor([1.0, -2.0, -100.0, 100.0]).double(),
    )

    def loss(c: Tensor, r: Tensor) -> Tensor:
        return pairwise(c, r, centering=0.1).values

    assert torch.autograd.gradcheck(loss, (chosen.requires_grad_(), rejected.requires_grad_()))
    far = pairwise(torch.tensor([-1e4]), torch.tensor([1e4]))
    assert far.values.item() == pytest.approx(2e4)
    assert not any(metric.requires_grad for metric in pairwise(chosen, rejected).metrics.values())


# ---- scores


def test_reference_samples_get_mean_zero_and_variance_one() -> None:
    scores = 5 + 3 * torch.randn(512, generator=torch.Generator().manual_seed(0))
    mean, deviation = score_scale(scores)
    normalised = normalise_scores(scores, mean=mean, deviation=deviation).double()
    assert normalised.mean().item() == pytest.approx(0, abs=1e-6)
    assert normalised.var(correction=0).item() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("scores", [[], [0.1], [0.1, 0.1, 0.1]])
def test_scores_without_a_scale_are_refused(scores: list[float]) -> None:
    with pytest.raises(ValueError, match="without two different scores"):
        score_scale(torch.tensor(scores))


def test_scores_are_clipped_and_then_replaced() -> None:
    scores, finished = torch.tensor([9.0, 9.0, 1.0]), torch.tensor([True, False, True])
    assert shape_scores(scores, finished, clip=5.0, missing_end=-7.0).tolist() == [5.0, -7.0, 1.0]
    assert shape_scores(scores, finished, clip=None, missing_end=None).tolist() == [9.0, 9.0, 1.0]
