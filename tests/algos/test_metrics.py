"""Metrics by hand, and over ranks."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from megarl.algos.metrics import (
    averaged,
    explained_variance,
    group_metrics,
    mismatch,
    objective_metrics,
    policy_drift,
    value_metrics,
)
from megarl.algos.normalization import Reduce
from megarl.algos.reward_shaping import kl_penalties
from tests.algos.examples import MASK
from tests.algos.inputs import local, measured_on_ranks, numbers


def test_rollout_logprob_difference_is_the_mean_over_tokens_of_all_ranks() -> None:
    old = torch.tensor([[-1.0, -2.0, -9.0], [-3.0, 5.0, 5.0]])
    rollout = torch.tensor([[-1.5, -2.0, -1.0], [-2.0, 0.0, 0.0]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    total, tokens = mismatch(old, rollout, mask)["rollout/logprob_gap"]
    assert averaged({"gap": (total, tokens)}, local) == {"gap": pytest.approx((0.5 + 0.0 + 1.0) / 3)}
    another_rank = torch.tensor([2.5, 1.0], dtype=torch.float64)
    found = averaged({"gap": (total, tokens)}, lambda v: v + another_rank)
    assert found == {"gap": pytest.approx((1.5 + 2.5) / 4)}
    nothing = torch.zeros(0, 0)
    assert averaged(mismatch(nothing, nothing, nothing.bool()), local) == {}


def test_the_sequence_log_ratio_is_clamped_before_it_is_doubled() -> None:
    mask = torch.ones(1, 3, dtype=torch.bool)
    old, rollout = torch.full((1, 3), -1.0), torch.full((1, 3), -6.0)
    found = averaged(mismatch(old, rollout, mask), local)["rollout_corr/chi2_sequence"]
    assert found == pytest.approx(math.expm1(2 * 15))
    found = averaged(mismatch(old, 2 * rollout, mask), local)["rollout_corr/chi2_sequence"]
    assert found == pytest.approx(math.expm1(2 * 20)), "the sum is 33"


def test_objective_metrics_are_summed_over_ranks() -> None:
    scores, old, kl = numbers(4, seed=0), numbers(*MASK.shape, seed=1), numbers(*MASK.shape, seed=2)

    def measure(rows: slice, reduce: Reduce) -> dict[str, float]:
        penalties = kl_penalties(kl[rows], MASK[rows], kl_coef=0.1)
        drift = averaged(policy_drift(old[rows], kl[rows], MASK[rows]), reduce)
        return {**drift, **objective_metrics(scores[rows], penalties, MASK[rows], reduce=reduce)}

    whole = measured_on_ranks(measure)
    assert whole["objective/kl"] == pytest.approx(kl[MASK].sum().item() / 4)
    assert whole["objective/kl_per_token"] == pytest.approx(kl[MASK].mean().item())
    of_rows = [kl[row][mask].mean().item() if mask.any() else 0.0 for row, mask in enumerate(MASK)]
    assert whole["objective/kl_token_mean"] == pytest.approx(statistics.mean(of_rows))
    assert whole["objective/rlhf_reward"] == pytest.approx(scores.mean().item() - 0.1 * whole["objective/kl"])


def test_the_branches_of_a_conversation_are_one_response() -> None:
    """Rows 0 and 2 are of one; ranks may have one of them each."""
    old, kl, tokens = numbers(*MASK.shape, seed=1), numbers(*MASK.shape, seed=2), MASK.sum(-1)
    lengths = torch.where(torch.tensor([True, False, True, False]), tokens[0] + tokens[2], tokens)

    def measure(rows: slice, reduce: Reduce) -> dict[str, float]:
        return averaged(policy_drift(old[rows], kl[rows], MASK[rows], lengths[rows]), reduce)

    whole = measured_on_ranks(measure)
    talks = [[0, 2], [1], [3]]
    means = [kl[talk][MASK[talk]].mean().item() if MASK[talk].any() else 0.0 for talk in talks]
    assert whole["objective/kl"] == pytest.approx(kl[MASK].sum().item() / 3)
    assert whole["objective/entropy"] == pytest.approx(-old[MASK].sum().item() / 3)
    assert whole["objective/kl_token_mean"] == pytest.approx(statistics.mean(means))
    assert whole["objective/kl_per_token"] == pytest.approx(kl[MASK].mean().item())


def test_value_metrics_are_over_all_ranks() -> None:
    returns, values = numbers(*MASK.shape, seed=0), numbers(*MASK.shape, seed=1)

    def measure(rows: slice, reduce: Reduce) -> dict[str, float]:
        return value_metrics(returns[rows], values[rows], MASK[rows], reduce=reduce)

    whole = measured_on_ranks(measure)
    targets = returns[MASK].tolist()
    assert whole["returns/mean"] == pytest.approx(statistics.mean(targets))
    assert whole["returns/var"] == pytest.approx(statistics.pvariance(targets))
    assert whole["value/mean"] == pytest.approx(values[MASK].mean().item())
    explained = 1 - statistics.variance((returns - values)[MASK].tolist()) / statistics.variance(targets)
    assert whole["value/explained_variance"] == pytest.approx(explained, abs=1e-4)


@pytest.mark.parametrize(("factor", "shift", "explained"), [(1.0, 0.0, 1.0), (1.0, 5.0, 1.0), (0.0, 3.0, 0.0)])
def test_perfect_and_constant_values(factor: float, shift: float, explained: float) -> None:
    returns = numbers(2, 4, seed=0)
    metrics = value_metrics(returns, factor * returns + shift, torch.ones(2, 4).bool(), reduce=local)
    assert metrics["value/explained_variance"] == pytest.approx(explained, abs=1e-4)


def test_explained_variance_of_new_values() -> None:
    assert explained_variance(3.0, 2.0) == -0.5
    assert explained_variance(0.0, 0.0) == 1.0


def test_group_metrics_by_hand() -> None:
    metrics = group_metrics(torch.tensor([1.0, 3.0, 5.0, 5.0, 2.0]), torch.tensor([0, 0, 1, 1, 2]))
    assert metrics["group/std_mean"] == pytest.approx(1 / 3)
    assert metrics["group/zero_std_fraction"] == pytest.approx(2 / 3)
