"""Properties of the losses, and agreement with the oracle's loops, one response at a time."""

from __future__ import annotations

import math
import random
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megarl.algos import (
    aggregation,
    policy_loss,
    preference_loss,
    registry,
)
from megarl.algos.aggregation import weighted_sum
from megarl.algos.optimization import ptx_shares
from megarl.algos.policy_loss import LossTerms, weighted, with_term
from tests.algos.examples import (
    AGGREGATIONS,
    MASK,
    POLICY_LOSSES,
    VALUE_LOSSES,
    cases,
    gradient,
    step_weights,
    tokens,
    total,
)
from tests.algos.inputs import local, numbers
from tests.oracle import kl as naive_kl
from tests.oracle import policy as naive_policy
from tests.oracle import ppo as oracle
from tests.oracle import values as naive_values
from tests.oracle.adam import AdamSettings
from tests.oracle.models import Sample

NAN = float("nan")


# ---- against the oracle

NAIVE_POLICY_LOSSES = {
    **cases(naive_policy, **{"ppo delta": {"dual_clip": 1.5}}),
    "cispo_upper": partial(naive_policy.cispo, clip_high=0.3, upper_only=True),
}
NAIVE_VALUE_LOSSES = cases(naive_values)


@pytest.mark.parametrize("name", POLICY_LOSSES)
@given(seed=st.integers(0, 99))
def test_policy_losses_and_their_gradients_equal_the_oracles(name: str, seed: int) -> None:
    new, old, advantages = tokens(seed)
    leaf = new.clone().requires_grad_()
    loss = POLICY_LOSSES[name](leaf, old, advantages, MASK)
    (gradient,) = torch.autograd.grad(loss.values[MASK].sum(), leaf)
    for row, mask in enumerate(MASK):
        if not mask.any():
            continue
        own = new[row][mask].requires_grad_()
        expected, clipped = NAIVE_POLICY_LOSSES[name](own, old[row][mask], advantages[row][mask])
        torch.testing.assert_close(loss.values[row][mask], expected.double())
        torch.testing.assert_close(gradient[row][mask], torch.autograd.grad(expected.sum(), own)[0])
        assert torch.equal(loss.metrics["clipfrac"][row][mask], clipped.double())


@pytest.mark.parametrize("name", VALUE_LOSSES)
@given(seed=st.integers(0, 99))
def test_value_losses_and_their_gradients_equal_the_oracles(name: str, seed: int) -> None:
    now, old, returns = (column.flatten() for column in tokens(seed))
    now.requires_grad_()
    loss = VALUE_LOSSES[name](now, old, returns)
    expected, clipped = NAIVE_VALUE_LOSSES[name](now, old, returns)
    torch.testing.assert_close(loss.values, expected)
    torch.testing.assert_close(torch.autograd.grad(loss.values.sum(), now), torch.autograd.grad(expected.sum(), now))
    assert torch.equal(loss.metrics["clipfrac"], clipped.double())


@given(st.integers(0, 99), st.sampled_from(["k1", "k2", "k3", "abs"]))
def test_losses_with_kl_penalty_and_entropy_bonus_equal_the_oracles(seed: int, estimator: str) -> None:
    new, old, advantages = (x[:1, :5] for x in tokens(seed))
    entropy, ref = numbers(1, 5, seed=seed + 7), new + 0.3 * numbers(1, 5, seed=seed + 8)
    settings = oracle.Settings(
        actor=AdamSettings(lr=1.0),
        policy=partial(naive_policy.ppo, clip=0.1),
        entropy_coef=0.3,
        kl_in_loss=True,
        kl_estimate=getattr(naive_kl, "absolute" if estimator == "abs" else estimator),
        kl_coef=0.2,
    )
    experience = oracle.Experience(
        old_logprobs=old[0].tolist(),
        ref_logprobs=ref[0].tolist(),
        old_values=[],
        advantages=advantages[0].tolist(),
        weights=[1.0, 0.0, 2.0, 0.5, 1.0],
    )
    sample = Sample(sample_id="", prompt_ids=[0], response_ids=[0] * 5, score=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oracle, "token_statistics", lambda *_: (new[0], entropy[0]))
        value_loss, metrics = oracle.policy_terms(torch.nn.Identity(), sample, experience, settings)
    ours = policy_loss.ppo(new, old, advantages, torch.ones(1, 5).bool(), clip=0.1)
    ours = weighted(ours, torch.tensor([experience.weights]).double())
    ours = with_term(ours, "kl", registry.KL_ESTIMATORS.function(estimator)(new, ref), coef=0.2)
    ours = with_term(ours, "entropy", entropy, coef=-0.3)
    torch.testing.assert_close(ours.values[0], value_loss)
    told = {**ours.metrics, **ours.spreads}
    for name, metric in metrics.items():
        torch.testing.assert_close(told[name][0], metric.double(), msg=name)


# ---- invariances

PAIRS = pytest.mark.parametrize(
    ("name", "aggregate"),
    [(name, "sequence_mean") for name in POLICY_LOSSES]
    + [("ppo", aggregate) for aggregate in AGGREGATIONS if aggregate != "sequence_mean"],
)


@PAIRS
def test_the_order_of_rows_and_their_split_change_nothing(name: str, aggregate: str) -> None:
    new, old, advantages = tokens(0)
    whole = total(POLICY_LOSSES[name](new, old, advantages, MASK), MASK, AGGREGATIONS[aggregate])
    weights = step_weights(MASK, AGGREGATIONS[aggregate])
    order = random.Random(0).sample(range(len(MASK)), len(MASK))
    for parts in (1, 2, 4):
        split = [order[i::parts] for i in range(parts)]
        loss = [POLICY_LOSSES[name](new[r], old[r], advantages[r], MASK[r]).values for r in split]
        added = sum(weighted_sum(own, weights[rows]) for own, rows in zip(loss, split, strict=True))
        torch.testing.assert_close(added, whole, rtol=1e-12, atol=0.0)


@PAIRS
def test_padding_and_rows_without_tokens_change_nothing(name: str, aggregate: str) -> None:
    new, old, advantages = (torch.where(MASK, x, NAN) for x in tokens(0))
    pad = torch.nn.functional.pad

    def measured(new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        leaf = new.clone().requires_grad_()
        loss = total(POLICY_LOSSES[name](leaf, old, advantages, mask), mask, AGGREGATIONS[aggregate])
        (grad,) = torch.autograd.grad(loss, leaf)
        return loss, grad

    loss, grad = measured(new, old, advantages, MASK)
    assert torch.isfinite(loss)
    assert torch.isfinite(grad).all()
    wider = [pad(x, (0, 3, 0, 2), value=NAN) for x in (new, old, advantages)]
    wide_loss, wide_grad = measured(*wider, pad(MASK, (0, 3, 0, 2), value=False))
    torch.testing.assert_close(wide_loss, loss, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(wide_grad[:-2, :-3], grad, rtol=1e-12, atol=0.0)
    assert not wide_grad[-2:].any()


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_the_first_update_is_the_policy_gradient(name: str) -> None:
    """Whatever the loss, at new = old its gradient is that of -A * log p, in sequences of one advantage."""
    _, old, advantages = tokens(0)
    advantages = advantages[:, :1].expand_as(old)
    loss = POLICY_LOSSES[name](old, old, advantages, MASK)
    assert not loss.metrics["clipfrac"][MASK].any()
    assert not loss.metrics["approxkl"].any()
    assert (loss.spreads["ratio"] == 1).all()
    leaf = old.clone().requires_grad_()
    (grad,) = torch.autograd.grad(
        total(POLICY_LOSSES[name](leaf, old, advantages, MASK), MASK, aggregation.sequence_mean), leaf
    )
    torch.testing.assert_close(grad, -advantages * step_weights(MASK, aggregation.sequence_mean))


# ---- single losses


def test_deepspeed_halves_a_loss_with_pretraining_texts() -> None:
    """The other modes are in the vectors."""
    assert ptx_shares(coef=27.8, mode="deepspeed") == (0.5, 13.9)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES.keys() - {"reinforce"}))
def test_extreme_log_ratios_stay_finite(name: str) -> None:
    new = torch.tensor([[500.0, -500.0]]).double()
    mask = torch.ones(1, 2).bool()
    loss = POLICY_LOSSES[name](new, torch.zeros(1, 2).double(), torch.tensor([[-1.0, 1.0]]).double(), mask)
    assert torch.isfinite(loss.values).all()
    assert torch.isfinite(gradient(POLICY_LOSSES[name], new, torch.zeros(1, 2), -torch.ones(1, 2), mask)).all()


def test_a_pair_by_hand() -> None:
    loss = preference_loss.pairwise(torch.tensor([1.0, 0.5]), torch.tensor([0.0, 0.5]), centering=0.1)
    assert loss.values.tolist() == pytest.approx([math.log(1 + math.exp(-1)) + 0.1, math.log(2) + 0.1])
    assert {name: value_loss.tolist() for name, value_loss in loss.metrics.items()} == {
        "accuracy": [1.0, 0.0],
        "margin": [1.0, 0.0],
        "chosen": [1.0, 0.5],
        "rejected": [0.0, 0.5],
    }


def test_extreme_pairs_stay_finite_and_a_margin_increases_the_loss() -> None:
    chosen, rejected = torch.tensor([1e4, -1e4]).double(), torch.tensor([-1e4, 1e4]).double()
    for kind in ("logsigmoid", "logexp"):
        assert preference_loss.pairwise(chosen, rejected, kind=kind).values.tolist() == [0.0, 2e4]  # type: ignore[arg-type]
    near = torch.tensor([0.5]).double()
    with_margin = preference_loss.pairwise(near, near, torch.tensor([0.7]), margin=True)
    torch.testing.assert_close(with_margin.values, preference_loss.pairwise(near - 0.7, near).values)
    assert preference_loss.pairwise(near, near).metrics["accuracy"].item() == 0.0


def test_terms_without_a_coefficient_are_only_metrics() -> None:
    loss = LossTerms(values=torch.ones(1, 2), metrics={})
    told = with_term(loss, "entropy", torch.tensor([[NAN, 2.0]]), coef=0.0)
    assert torch.equal(told.values, loss.values)
    assert told.metrics["entropy"][0, 1] == 2.0


def test_metrics_carry_no_gradient() -> None:
    new, old, advantages = tokens(0)
    leaf = new.requires_grad_()
    losses = [function(leaf, old, advantages, MASK) for function in POLICY_LOSSES.values()]
    losses += [function(leaf, old, advantages) for function in VALUE_LOSSES.values()]
    losses += [preference_loss.pairwise(leaf[0], leaf[1]), preference_loss.best_of_n(leaf, torch.zeros(4).long())]
    losses += [with_term(losses[0], "kl", leaf, coef=0.1)]
    for loss in losses:
        assert not any(x.requires_grad for x in {**loss.metrics, **loss.spreads}.values())


def test_losses_stay_on_the_device_of_their_arguments() -> None:
    x, mask = torch.zeros(2, 3, device="meta"), torch.ones(2, 3, dtype=torch.bool, device="meta")
    losses = [function(x, x, x, mask) for function in POLICY_LOSSES.values()]
    losses += [function(x, x, x) for function in VALUE_LOSSES.values()]
    losses += [preference_loss.pairwise(x, x, x, margin=True), preference_loss.best_of_n(x, mask.sum(-1))]
    losses += [preference_loss.span(x, x, x.long(), x.long(), 0), weighted(losses[0], x)]
    for loss in losses:
        assert {loss.values.device.type, *(v.device.type for v in loss.metrics.values())} == {"meta"}
    for weigh in map(registry.ROLLOUT_WEIGHTS.function, registry.ROLLOUT_WEIGHTS.functions):
        assert weigh(x, x, mask, local).device.type == "meta"
    for aggregate in AGGREGATIONS.values():
        assert aggregate(mask, total_tokens=6, total_sequences=2).device.type == "meta"
