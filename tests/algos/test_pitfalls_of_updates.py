"""Mistakes that known systems make, or made, in their losses, corrections, optimizers and averages.

Each test is named after the mistake and checks that MegaRL does not make it.
"""

from __future__ import annotations

import inspect

import pytest
import torch

from megarl.algos import policy_loss, registry, rollout_correction, value_loss
from megarl.algos.aggregation import sequence_mean, token_mean, weighted_sum
from megarl.algos.kl import KLController
from megarl.algos.metrics import averaged, objective_metrics, policy_drift
from megarl.algos.normalization import Reduce
from megarl.algos.optimization import ema
from megarl.algos.policy_loss import LossTerms, weighted
from megarl.algos.preference_loss import span, spans_of
from megarl.algos.reward_shaping import keep_finished, kl_penalties
from megarl.algos.rollout_correction import m2po
from megarl.models.architecture import model_spec
from tests.algos.examples import MASK, POLICY_LOSSES, VALUE_LOSSES, gradient, step_weights, tokens, total
from tests.algos.inputs import local, numbers, on_ranks
from tests.algos.vector_adapter import run
from tests.megatron.tiny import GPT2_SIZES


def test_p03_dropout_in_the_passes_of_the_update() -> None:
    """A model trained with dropout is rebuilt without: the first ratio of an update is 1."""
    rates = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.1)
    built = model_spec({"model_type": "gpt2", **GPT2_SIZES, **rates}).transformer(tp=1).transformer
    assert {built[name] for name in ("hidden_dropout", "attention_dropout")} == {0.0}


def test_p04_a_mean_of_means_of_micro_batches() -> None:
    """Micro-batches of unequal lengths: means of means would give tokens of short ones more weight."""
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]]).bool()
    loss = torch.tensor([[1.0, 1.0, 1.0, 1.0], [6.0, 0.0, 0.0, 0.0]]).double()
    totals = {"total_tokens": 5, "total_sequences": 2}
    parts = [weighted_sum(loss[i : i + 1], step_weights(mask[i : i + 1], token_mean, **totals)) for i in range(2)]
    assert float(sum(parts)) == pytest.approx(2.0)
    assert (1.0 + 6.0) / 2 == 3.5, "what micro-batch means would make of it"


def test_p05_a_kl_coefficient_that_diverges_over_ranks() -> None:
    """The controllers of all ranks get the KL of all samples."""
    kl, old = torch.ones(MASK.shape), numbers(*MASK.shape, seed=1)

    def coefficient(rows: slice, reduce: Reduce) -> float:
        told = averaged(policy_drift(old[rows], kl[rows], MASK[rows]), reduce)
        controller = KLController(0.1, target=3.0, horizon=100.0)
        controller.update(told["objective/kl"], 4)
        return controller.coef

    one, *others = on_ranks(coefficient, [(slice(0, 1),), (slice(1, 4),), (slice(0, 0),)])
    assert others == [one, one]
    assert one == coefficient(slice(0, 4), local) != coefficient(slice(0, 1), local)


def test_p06_a_controller_that_reads_penalties_instead_of_kl() -> None:
    kl, coef = numbers(*MASK.shape, seed=0), 0.1
    drift = averaged(policy_drift(torch.zeros(*MASK.shape), kl, MASK), local)["objective/kl"]
    told = objective_metrics(torch.zeros(4), kl_penalties(kl, MASK, kl_coef=coef), MASK, reduce=local)
    assert drift == pytest.approx(kl[MASK].sum().item() / 4)
    assert told["objective/non_score_reward"] == pytest.approx(-coef * drift)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_p09_a_mask_of_truncated_responses_that_is_not_used(name: str) -> None:
    new, old, advantages = tokens(0)
    finished = torch.tensor([True, True, True, False])
    keep = keep_finished(MASK, finished)
    leaf = new.clone().requires_grad_()
    loss = weighted(POLICY_LOSSES[name](leaf, old, advantages, MASK), keep.double())
    (grad,) = torch.autograd.grad(total(loss, MASK), leaf)
    assert not grad[~finished].any()
    whole = gradient(POLICY_LOSSES[name], new, old, advantages)
    torch.testing.assert_close(grad[finished], whole[finished])  # and the denominator is that of all tokens


def test_p10_an_entropy_that_includes_padding() -> None:
    old = numbers(*MASK.shape, seed=0)
    told = []
    for filler in (1.0, -7.0, float("nan")):
        filled = torch.where(MASK, old, filler)
        told.append(averaged(policy_drift(filled, None, MASK), local)["objective/entropy"])
    assert told == pytest.approx([-old[MASK].sum().item() / 4] * 3)


def test_p11_an_entropy_before_the_temperature() -> None:
    logits = numbers(1, 2, 5, seed=0)
    args = {"logits": logits.tolist(), "labels": [[0, 1]], "temperature": 0.5}
    entropy = torch.tensor(run({"fn": "token_statistics", "args": args})["entropy"]).double()
    torch.testing.assert_close(entropy, torch.distributions.Categorical(logits=logits / 0.5).entropy())


def test_p12_a_value_loss_without_its_half_and_with_another_clip_fraction() -> None:
    """The value moved by more than the clip, but towards the return: no clip decides, and it does not count as one."""
    old, now, returns = (torch.tensor([[x]]).double() for x in (0.0, -1.0, 2.0))
    away = value_loss.mse(now, old, returns, clip=0.2)
    assert away.values.item() == pytest.approx(0.5 * 9.0)
    assert away.metrics["clipfrac"].item() == 0.0
    towards = value_loss.mse(-now, old, returns, clip=0.2)
    assert towards.values.item() == pytest.approx(0.5 * (2.0 - 0.2) ** 2)
    assert towards.metrics["clipfrac"].item() == 1.0


@pytest.mark.parametrize("aggregate", [token_mean, sequence_mean])
def test_p16_denominators_of_the_kept_tokens_only(aggregate: type) -> None:
    """Dropped tokens stay in the denominator: the weights of the others do not change."""
    new, old, advantages = tokens(0)
    loss = policy_loss.ppo(new, old, advantages, MASK)
    keep = rollout_correction.rejection(new, old, MASK, statistic="token_k2", upper=0.02)
    assert keep.any()
    assert (MASK & ~keep).any()
    kept = total(weighted(loss, keep.double()), MASK, aggregate)
    weights = step_weights(MASK, aggregate)
    torch.testing.assert_close(kept, (loss.values * weights)[keep].sum())


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_p21_a_micro_batch_without_unmasked_tokens(name: str) -> None:
    """Its loss is 0 with a gradient of zeros: the other stages wait for it."""
    new, old, advantages = (torch.full((2, 3), float("nan")) for _ in range(3))
    leaf, mask = new.requires_grad_(), torch.zeros(2, 3).bool()
    loss = POLICY_LOSSES[name](leaf, old, advantages, mask)
    weights = token_mean(mask, total_tokens=9, total_sequences=3)
    (grad,) = torch.autograd.grad(weighted_sum(loss.values, weights), leaf)
    assert weighted_sum(loss.values, weights).item() == 0.0
    assert torch.equal(grad, torch.zeros(2, 3))


def test_p24_a_ratio_to_rollout_logprobs_when_old_ones_are_missing() -> None:
    for name in registry.POLICY_LOSSES.functions:
        function = registry.POLICY_LOSSES.function(name)
        parameter = inspect.signature(function).parameters.get("old_logprobs")
        assert name == "sft" or parameter is not None
        assert parameter is None or parameter.default is parameter.empty, f"{name} must be told what its ratio is to"
    new, old, advantages = tokens(0)
    assert not torch.equal(
        policy_loss.ppo(new, old, advantages, MASK).values, policy_loss.ppo(new, new, advantages, MASK).values
    )


def test_p25_an_average_in_bfloat16_that_never_moves() -> None:
    weights = torch.full((3,), 1.0)
    near = weights + 1e-3
    stuck = 0.992 * weights.bfloat16() + 0.008 * near.bfloat16()
    assert torch.equal(stuck, weights.bfloat16()), "the mistake: (1 - decay) * difference is lost in rounding"
    assert (ema(weights, near, decay=0.992) > weights).all()
    with pytest.raises(TypeError, match=r"average of torch\.bfloat16 does not move: keep it in float32"):
        ema(weights.bfloat16(), near, decay=0.992)


def test_p26_a_dual_clip_of_positive_advantages() -> None:
    old, mask = torch.zeros(1, 2).double(), torch.ones(1, 2).bool()
    new = torch.tensor([[5.0, -5.0]]).double()
    positive = torch.ones(1, 2).double()
    one, other = (policy_loss.ppo(new, old, positive, mask, dual_clip=c) for c in (None, 1.1))
    assert torch.equal(one.values, other.values)
    assert not other.metrics["clipfrac_lower"].any()
    bounded = policy_loss.ppo(new, old, -positive, mask, dual_clip=3.0)
    assert bounded.values[0].tolist() == pytest.approx([3.0, 0.8])
    assert bounded.metrics["clipfrac_lower"].tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize("name", VALUE_LOSSES)
def test_p29_a_value_loss_on_prompt_tokens(name: str) -> None:
    now, old, returns = tokens(0)
    leaf = now.clone().requires_grad_()
    (grad,) = torch.autograd.grad(total(VALUE_LOSSES[name](leaf, old, returns), MASK), leaf)
    assert not grad[~MASK].any()
    assert grad[MASK].any()


def test_p30_a_last_token_of_an_empty_response() -> None:
    """Two empty responses: the score is placed on the first column, not on the last."""
    empty = torch.zeros(1, 4).long()
    spans = spans_of(empty, empty, pad=0)
    assert (spans.chosen_last.item(), spans.rejected_last.item()) == (0, 0)
    assert torch.isfinite(span(torch.zeros(1, 4), torch.ones(1, 4), spans).values).all()


@pytest.mark.parametrize(
    "correct", [registry.ROLLOUT_WEIGHTS.function(name) for name in registry.ROLLOUT_WEIGHTS.functions]
)
def test_p13_a_rank_without_tokens_that_skips_a_reduction(correct: type) -> None:
    calls = []

    def counted(vector: torch.Tensor) -> torch.Tensor:
        calls.append(len(vector))
        return vector

    for mask in (MASK, torch.zeros_like(MASK)):
        calls.append(0)
        correct(*tokens(0)[:2], mask, counted, batch_normalise=True)
        assert calls[-1] == 2, "once, whatever there is"
    assert m2po(*tokens(0)[:2], torch.zeros_like(MASK), counted).sum() == 0
    assert calls[-1] == 512
    nothing = LossTerms(values=torch.zeros(0, 0), metrics={})
    assert weighted(nothing, torch.zeros(0, 0)).values.shape == (0, 0)
