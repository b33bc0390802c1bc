"""Properties of the algorithms, and agreement with the oracle's loops over plain numbers."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from functools import partial
from math import exp

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megarl.algos.advantages import gae
from megarl.algos.aggregation import sequence_mean, token_mean, weighted_sum
from megarl.algos.kl import k1, k2, k3
from megarl.algos.metrics import objective_metrics, value_metrics
from megarl.algos.normalisation import Reduce, masked_moments, whiten
from megarl.algos.policy import ppo
from megarl.algos.registry import KL_ESTIMATORS, POLICY_LOSSES, choose
from megarl.algos.rewards import clip_scores, kl_penalties, replace_missing_end, token_rewards
from megarl.algos.terms import LossTerms, with_term
from megarl.algos.values import mse
from tests.algos.adapters.common import local, on_ranks
from tests.oracle import advantages as naive_advantages
from tests.oracle import kl as naive_kl
from tests.oracle import normalisation as naive_normalisation
from tests.oracle import policy as naive_policy
from tests.oracle import ppo as oracle
from tests.oracle import values as naive_values
from tests.oracle.adam import AdamSettings
from tests.oracle.models import Sample

NAN = float("nan")
ALL_OF_FIVE = torch.ones(1, 5).bool()


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def lengths_mask(lengths: list[int], width: int) -> Tensor:
    return torch.tensor([[t < n for t in range(width)] for n in lengths], dtype=torch.bool).reshape(len(lengths), width)


def rows_of(values: Tensor, lengths: list[int]) -> list[list[float]]:
    return [row[:n].tolist() for row, n in zip(values, lengths, strict=True)]


lengths = st.lists(st.integers(0, 6), min_size=1, max_size=5)
fractions = st.floats(0, 1)


# ---- against the oracle


@given(lengths, fractions, fractions, st.integers(0, 99))
def test_gae_is_the_sum_of_its_definition(lengths: list[int], gamma: float, lam: float, seed: int) -> None:
    rewards, values = numbers(len(lengths), 6, seed=seed), numbers(len(lengths), 6, seed=seed + 1)
    mask = lengths_mask(lengths, 6)
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    for i, n in enumerate(lengths):
        expected, _ = naive_advantages.gae(rewards[i, :n].tolist(), values[i, :n].tolist(), gamma=gamma, lam=lam)
        assert advantages[i, :n].tolist() == pytest.approx(expected, abs=1e-10)
        assert returns[i, :n].tolist() == pytest.approx((values[i, :n] + advantages[i, :n]).tolist(), abs=1e-12)
    assert not advantages[~mask].any()
    assert not returns[~mask].any()


@given(st.lists(st.lists(st.integers(0, 6), max_size=4), min_size=1, max_size=3), st.integers(0, 99))
def test_whitening_does_not_depend_on_the_ranks(ranks: list[list[int]], seed: int) -> None:
    """Ranks without rows, or without tokens, take part."""
    shards = [(numbers(len(r), 6, seed=seed + i) + 100.0, lengths_mask(r, 6)) for i, r in enumerate(ranks)]
    rows = [row for (values, _), r in zip(shards, ranks, strict=True) for row in rows_of(values, r)]
    whitened = on_ranks(whiten, shards)
    if sum(map(len, rows)):
        rows = naive_normalisation.whiten(rows)
    ours = [row for values, r in zip(whitened, ranks, strict=True) for row in rows_of(values, r)]
    for one, other in zip(ours, rows, strict=True):
        assert one == pytest.approx(other, abs=1e-9)
    for values, (_, mask) in zip(whitened, shards, strict=True):
        assert not values[~mask].any()


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


# ---- kl


def test_kl_estimators_vanish_at_equality_and_average_to_the_kl() -> None:
    p, q = torch.softmax(numbers(7, seed=0), 0), torch.softmax(numbers(7, seed=1), 0)
    exact = (p * (p / q).log()).sum()
    for estimate in (k1, k3):
        torch.testing.assert_close((p * estimate(p.log(), q.log())).sum(), exact)
    for estimate in KL_ESTIMATORS.values():
        assert not estimate(p.log(), p.log()).any()
    assert (k2(p.log(), q.log()) > 0).all()
    assert (k3(p.log(), q.log()) > 0).all()


def test_the_gradient_of_k2_is_that_of_the_kl() -> None:
    logits, q = numbers(7, seed=0).requires_grad_(), torch.softmax(numbers(7, seed=1), 0)
    logp = torch.log_softmax(logits, 0)
    (exact,) = torch.autograd.grad((logp.exp() * (logp - q.log())).sum(), logits, retain_graph=True)
    (sampled,) = torch.autograd.grad((logp.exp().detach() * k2(logp, q.log())).sum(), logits)
    torch.testing.assert_close(sampled, exact)


@pytest.mark.parametrize(("name", "slope"), [("k1", lambda d: 1.0), ("k2", lambda d: d), ("k3", lambda d: 1 - exp(-d))])
def test_a_penalty_in_the_loss_pulls_as_its_estimator_says(name: str, slope: Callable[[float], float]) -> None:
    new, ref = torch.tensor([[-1.0, -2.0, -0.5]]).double().requires_grad_(), torch.tensor([[-1.5, -1.0, -0.5]])
    nothing = LossTerms(values=torch.zeros(1, 3), metrics={})
    loss = with_term(nothing, "kl", KL_ESTIMATORS[name](new, ref), coef=0.1)
    (grad,) = torch.autograd.grad(loss.values.sum(), new)
    assert grad[0].tolist() == pytest.approx([0.1 * slope(d) for d in (0.5, -1.0, 0.0)])
    assert not loss.metrics["kl"].requires_grad


def test_k3_has_no_gradient_where_it_is_clamped() -> None:
    new = torch.tensor([-30.0, -4.0, -1.0], requires_grad=True)
    (grad,) = torch.autograd.grad(k3(new, torch.zeros(3)).sum(), new)
    assert grad.tolist() == pytest.approx([0.0, 0.0, 1 - exp(1.0)])


# ---- rewards


@given(lengths, st.floats(0, 1), st.integers(0, 99))
def test_rewards_add_up_to_the_score_less_the_kl(lengths: list[int], coef: float, seed: int) -> None:
    mask, scores, kl = (
        lengths_mask(lengths, 6),
        numbers(len(lengths), seed=seed),
        numbers(len(lengths), 6, seed=seed + 1),
    )
    rewards = token_rewards(scores, kl_penalties(torch.where(mask, kl, NAN), mask, kl_coef=coef), mask)
    for i, n in enumerate(lengths):
        expected = (scores[i] - coef * kl[i, :n].sum()).item() if n else 0.0
        assert rewards[i].sum().item() == pytest.approx(expected, abs=1e-9)
        if n:
            assert rewards[i, n - 1].item() == pytest.approx((scores[i] - coef * kl[i, n - 1]).item(), abs=1e-9)


def test_the_score_stands_on_the_last_token_that_counts() -> None:
    mask = torch.tensor([[True, False, True, False], [False] * 4])
    rewards = token_rewards(torch.tensor([2.0, 3.0]), torch.zeros(2, 4), mask)
    assert rewards.tolist() == [[0, 0, 2, 0], [0, 0, 0, 0]]


def test_the_fixed_score_of_a_missing_end_is_not_clipped() -> None:
    scores = clip_scores(torch.tensor([9.0, -9.0, 1.0]), 5.0)
    assert replace_missing_end(scores, torch.tensor([True, True, False]), -7.0).tolist() == [5.0, -5.0, -7.0]


# ---- advantages


@given(lengths, st.integers(0, 99))
def test_padding_and_rows_that_do_not_count_change_nothing(lengths: list[int], seed: int) -> None:
    rewards, values = numbers(len(lengths), 6, seed=seed), numbers(len(lengths), 6, seed=seed + 1)
    mask = lengths_mask(lengths, 6)
    narrow = gae(rewards, values, mask, gamma=0.9, lam=0.8)
    wide = torch.nn.functional.pad
    padded = gae(
        wide(rewards, (0, 3, 0, 1), value=NAN),
        wide(values, (0, 3, 0, 1), value=NAN),
        wide(mask, (0, 3, 0, 1), value=False),
        gamma=0.9,
        lam=0.8,
    )
    for one, other in zip(narrow, padded, strict=True):
        assert torch.equal(one, other[:-1, :-3])
        assert not other[-1].any()


@given(st.lists(st.booleans(), min_size=6, max_size=6), st.integers(0, 99))
def test_gaps_are_passed_over(counts: list[bool], seed: int) -> None:
    rewards, values, mask = numbers(1, 6, seed=seed), numbers(1, 6, seed=seed + 1), torch.tensor([counts])
    advantages, returns = gae(rewards, values, mask, gamma=0.9, lam=0.8)
    closed = gae(rewards[mask][None], values[mask][None], torch.ones(1, sum(counts)).bool(), gamma=0.9, lam=0.8)
    assert torch.equal(advantages[mask], closed[0][0])
    assert torch.equal(returns[mask], closed[1][0])


def test_lambda_one_gives_the_reward_to_go() -> None:
    rewards, values = numbers(3, 6, seed=0), numbers(3, 6, seed=1)
    _, returns = gae(rewards, values, torch.ones(3, 6).bool(), gamma=1.0, lam=1.0)
    torch.testing.assert_close(returns, rewards.flip(1).cumsum(1).flip(1))


# ---- normalisation


def test_whitening_a_constant_gives_zero() -> None:
    assert not whiten(torch.full((2, 3), 7.0), torch.ones(2, 3).bool(), local).any()
    assert not whiten(torch.full((1, 1), 7.0), torch.ones(1, 1).bool(), local).any()
    assert not whiten(torch.full((2, 3), NAN), torch.zeros(2, 3).bool(), local).any()


def test_the_variance_survives_a_mean_that_float32_would_drown_it_in() -> None:
    values = torch.tensor([4096.0, 4096.5, 4097.0])
    moments = masked_moments(values, torch.ones(3).bool(), local)
    assert moments.variance.item() == pytest.approx(1 / 6, rel=1e-12)


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


def test_an_unknown_name_lists_the_choices() -> None:
    assert choose(POLICY_LOSSES, "clip", "algo.policy_loss") is ppo
    with pytest.raises(ValueError, match=r"algo\.kl\.estimator is 'k4': it must be one of k1, k2, k3"):
        choose(KL_ESTIMATORS, "k4", "algo.kl.estimator")
