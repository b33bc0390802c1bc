"""Properties of the algorithms, and agreement with the oracle's loops over plain numbers."""

from __future__ import annotations

import random
import statistics
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megarl.algos.aggregation import sequence_mean, token_mean, weighted_sum
from megarl.algos.metrics import objective_metrics, value_metrics
from megarl.algos.normalisation import Reduce
from megarl.algos.policy import ppo
from megarl.algos.registry import KL_ESTIMATORS
from megarl.algos.rewards import kl_penalties
from megarl.algos.terms import LossTerms, with_term
from megarl.algos.values import mse
from tests.algos.adapters.common import local, on_ranks
from tests.algos.inputs import NAN, lengths, lengths_mask, numbers, rows_of
from tests.oracle import kl as naive_kl
from tests.oracle import policy as naive_policy
from tests.oracle import ppo as oracle
from tests.oracle import values as naive_values
from tests.oracle.adam import AdamSettings
from tests.oracle.models import Sample

ALL_OF_FIVE = torch.ones(1, 5).bool()


# ---- against the oracle


@given(st.integers(0, 99), st.floats(0.05, 0.5), st.sampled_from([None, 0.2]), st.sampled_from(["k1", "k2", "k3", ""]))
def test_losses_are_those_of_the_oracle(seed: int, clip: float, value_clip: float | None, estimator: str) -> None:
    new, old, advantages, entropy, noise = (numbers(1, 5, seed=seed + i) for i in range(5))
    ref = new + 0.3 * noise  # near enough that nothing is clamped
    settings = oracle.Settings(
        actor=AdamSettings(lr=1.0),
        critic=AdamSettings(lr=1.0),
        policy=partial(naive_policy.ppo, clip=clip),
        value=partial(naive_values.mse, clip=value_clip),
        entropy_coef=0.3,
        kl_in_loss=bool(estimator),
        kl_estimate=getattr(naive_kl, estimator or "k1"),
        kl_coef=0.2,
    )
    experience = oracle.Experience(
        old_logprobs=old[0].tolist(),
        ref_logprobs=ref[0].tolist(),
        old_values=old[0].tolist(),
        rewards=[],
        advantages=advantages[0].tolist(),
        returns=advantages[0].tolist(),
        weights=[1.0] * 5,
    )
    sample = Sample(sample_id="", prompt_ids=[0], response_ids=[0] * 5, score=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oracle, "token_statistics", lambda *_: (new[0], entropy[0]))
        patch.setattr(oracle, "token_values", lambda *_: new[0])
        policy, policy_metrics = oracle.policy_terms(torch.nn.Identity(), sample, experience, settings)
        value, value_metrics = oracle.value_terms(torch.nn.Identity(), sample, experience, settings)
    ours = ppo(new, old, advantages, ALL_OF_FIVE, clip=clip)
    if estimator:
        ours = with_term(ours, "kl", KL_ESTIMATORS[estimator](new, ref), coef=0.2)
    check_loss(with_term(ours, "entropy", entropy, coef=-0.3), policy, policy_metrics)
    check_loss(mse(new, old, advantages, clip=value_clip), value, value_metrics)


def check_loss(ours: LossTerms, values: Tensor, metrics: dict[str, Tensor]) -> None:
    """The oracle tells the same; a dual clip is not among its settings."""
    told = {**ours.metrics, **ours.spreads}
    torch.testing.assert_close(ours.values[0], values)
    assert told.keys() - {"clipfrac_lower"} == metrics.keys()
    for name, metric in metrics.items():
        torch.testing.assert_close(told[name][0], metric.to(torch.float64), msg=name)


# ---- losses


@pytest.mark.parametrize("shift", [1e-9, 0.0])
def test_the_first_step_is_the_policy_gradient(shift: float) -> None:
    old, advantages = numbers(2, 4, seed=0), numbers(2, 4, seed=1)
    new = (old + shift).requires_grad_()
    loss = ppo(new, old, advantages, torch.ones_like(old).bool(), clip=0.2)
    (grad,) = torch.autograd.grad(loss.values.sum(), new)
    torch.testing.assert_close(grad, -advantages)
    assert not loss.metrics["clipfrac"].any()


@given(st.integers(0, 99))
def test_gradients_agree_with_finite_differences(seed: int) -> None:
    new, old, other = (numbers(2, 4, seed=seed + i) for i in range(3))

    def policy(x: Tensor) -> Tensor:
        return with_term(ppo(x, old, other, x > -9, clip=0.2), "entropy", x.square(), coef=-0.1).values

    def value(x: Tensor) -> Tensor:
        return mse(x, old, other, clip=0.2).values

    for loss in (policy, value):
        assert torch.autograd.gradcheck(loss, new.clone().requires_grad_(), eps=1e-7, atol=1e-5)


def test_a_log_ratio_beyond_any_use_stays_finite() -> None:
    new = torch.tensor([[500.0, -500.0]], requires_grad=True)
    loss = ppo(new, torch.zeros(1, 2), torch.tensor([[-1.0, 1.0]]), torch.ones(1, 2).bool(), clip=0.2)
    assert torch.isfinite(loss.values).all()
    (grad,) = torch.autograd.grad(loss.values.sum(), new)
    assert torch.isfinite(grad).all()


def test_metrics_carry_no_gradient() -> None:
    new = numbers(1, 3, seed=0).requires_grad_()
    policy = with_term(ppo(new, new.detach(), new.detach(), new > -9, clip=0.2), "entropy", new * 2, coef=0.0)
    value = mse(new, new.detach(), new.detach(), clip=None)
    assert not any(metric.requires_grad for loss in (policy, value) for metric in loss.metrics.values())


# ---- aggregation


@given(lengths.filter(any), st.integers(0, 99), st.integers(1, 4))
def test_weighted_sums_do_not_depend_on_the_split(lengths: list[int], seed: int, parts: int) -> None:
    values, mask = numbers(len(lengths), 6, seed=seed), lengths_mask(lengths, 6)
    totals = {"total_tokens": sum(lengths), "total_sequences": sum(n > 0 for n in lengths)}
    order = list(range(len(lengths)))
    random.Random(seed).shuffle(order)
    rows = rows_of(values, lengths)
    expected = {
        token_mean: sum(map(sum, rows)) / sum(lengths),
        sequence_mean: sum(sum(row) / len(row) for row in rows if row) / totals["total_sequences"],
    }
    for aggregate, mean in expected.items():
        split = sum(
            weighted_sum(values[order[i::parts]], aggregate(mask[order[i::parts]], **totals, dtype=torch.float64))
            for i in range(parts)
        )
        assert float(split) == pytest.approx(mean, abs=1e-12)
        assert aggregate(mask, **totals).dtype == torch.float32


def test_a_row_without_tokens_is_averaged_over_where_the_total_includes_it() -> None:
    values, mask = torch.tensor([[1.0, 3.0], [4.0, 7.0], [9.0, 9.0]]), lengths_mask([2, 1, 0], 2)
    for total_sequences, mean in ((3, (2.0 + 4.0 + 0.0) / 3), (2, (2.0 + 4.0) / 2)):
        weights = sequence_mean(mask, total_tokens=3, total_sequences=total_sequences)
        assert weighted_sum(values, weights).item() == pytest.approx(mean)


def test_what_does_not_count_may_be_anything() -> None:
    values = torch.tensor([[1.0, NAN], [float("inf"), 3.0]], requires_grad=True)
    total = weighted_sum(values, torch.tensor([[0.5, 0.0], [0.0, 0.5]]))
    assert total.item() == 2.0
    total.backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[0.5, 0.0], [0.0, 0.5]]


def test_a_micro_batch_without_tokens_adds_nothing() -> None:
    for aggregate in (token_mean, sequence_mean):
        for shape in ((0, 0), (2, 3)):
            weights = aggregate(torch.zeros(shape).bool(), total_tokens=9, total_sequences=3)
            assert weighted_sum(torch.ones(shape), weights).item() == 0.0


# ---- the rest


def test_objective_metrics_add_up_over_ranks() -> None:
    mask = lengths_mask([3, 1, 2], 3)
    scores, old, kl = numbers(3, seed=0), numbers(3, 3, seed=1), numbers(3, 3, seed=2)

    def measure(rows: slice, reduce: Reduce) -> dict[str, float]:
        penalties = kl_penalties(kl[rows], mask[rows], kl_coef=0.1)
        return objective_metrics(scores[rows], old[rows], kl[rows], penalties, mask[rows], reduce=reduce)

    whole = measure(slice(0, 3), local)
    for ranks in ([slice(0, 1), slice(1, 3)], [slice(0, 3), slice(0, 0)]):
        for metrics in on_ranks(measure, [(rows,) for rows in ranks]):
            assert metrics == pytest.approx(whole)
    assert whole["objective/kl"] == pytest.approx(kl[mask].sum().item() / 3)
    assert whole["objective/rlhf_reward"] == pytest.approx(scores.mean().item() - 0.1 * whole["objective/kl"])
    assert whole["objective/kl_per_token"] == pytest.approx(kl[mask].mean().item())


def test_explained_variance_is_over_all_ranks() -> None:
    mask = lengths_mask([3, 1, 2], 3)
    returns, values = numbers(3, 3, seed=0), numbers(3, 3, seed=1)

    def measure(rows: slice, reduce: Reduce) -> dict[str, float]:
        return value_metrics(returns[rows], values[rows], mask[rows], reduce=reduce)

    whole = measure(slice(0, 3), local)
    for ranks in ([slice(0, 1), slice(1, 3)], [slice(0, 3), slice(0, 0)]):
        for metrics in on_ranks(measure, [(rows,) for rows in ranks]):
            assert metrics == pytest.approx(whole)
    targets = returns[mask].tolist()
    assert whole["returns/mean"] == pytest.approx(statistics.mean(targets))
    assert whole["returns/var"] == pytest.approx(statistics.pvariance(targets))
    assert whole["value/mean"] == pytest.approx(values[mask].mean().item())
    errors = (returns - values)[mask].tolist()
    explained = 1 - statistics.variance(errors) / statistics.variance(targets)
    assert whole["value/explained_variance"] == pytest.approx(explained, abs=1e-4)


@pytest.mark.parametrize(("factor", "shift", "explained"), [(1.0, 0.0, 1.0), (1.0, 5.0, 1.0), (0.0, 3.0, 0.0)])
def test_perfect_and_constant_values(factor: float, shift: float, explained: float) -> None:
    returns = numbers(2, 4, seed=0)
    metrics = value_metrics(returns, factor * returns + shift, torch.ones(2, 4).bool(), reduce=local)
    assert metrics["value/explained_variance"] == pytest.approx(explained, abs=1e-4)
