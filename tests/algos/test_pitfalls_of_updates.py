"""Mistakes that known systems make, or made, in their losses, corrections, optimizers and averages.

Each test is named after the mistake and checks that MegaRL does not make it.
"""

from __future__ import annotations

import pytest
import torch

from megarl.algos import policy_loss, registry, rollout_correction
from megarl.algos.aggregation import sequence_mean, token_mean, weighted_sum
from megarl.algos.metrics import averaged, policy_drift
from megarl.algos.optimization import ema
from megarl.algos.policy_loss import LossTerms, weighted
from megarl.algos.preference_loss import span
from megarl.algos.rollout_correction import m2po
from megarl.models.architecture import model_spec
from tests.algos.examples import MASK, POLICY_LOSSES, step_weights, tokens, total
from tests.algos.inputs import local, numbers
from tests.megatron.tiny import GPT2_SIZES


def test_p03_dropout_in_the_passes_of_the_update() -> None:
    """A model trained with dropout is rebuilt without: the first ratio of an update is 1."""
    rates = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.1)
    built = model_spec({"model_type": "gpt2", **GPT2_SIZES, **rates}).transformer_fields()
    assert {built[name] for name in ("hidden_dropout", "attention_dropout")} == {0.0}


def test_p10_an_entropy_that_includes_padding() -> None:
    old = numbers(*MASK.shape, seed=0)
    told = []
    for filler in (1.0, -7.0, float("nan")):
        filled = torch.where(MASK, old, filler)
        told.append(averaged(policy_drift(filled, None, MASK), local)["objective/entropy"])
    assert told == pytest.approx([-old[MASK].sum().item() / 4] * 3)


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


def test_p25_an_average_in_bfloat16_that_never_moves() -> None:
    weights = torch.full((3,), 1.0)
    near = weights + 1e-3
    stuck = 0.992 * weights.bfloat16() + 0.008 * near.bfloat16()
    assert torch.equal(stuck, weights.bfloat16()), "the mistake: (1 - decay) * difference is lost in rounding"
    assert (ema(weights, near, decay=0.992) > weights).all()
    with pytest.raises(TypeError, match=r"average of torch\.bfloat16 does not move: keep it in float32"):
        ema(weights.bfloat16(), near, decay=0.992)


def test_p30_a_last_token_of_an_empty_response() -> None:
    """Two empty responses: the score is placed on the first column, not on the last."""
    empty = torch.zeros(1, 4).long()
    loss = span(torch.arange(4.0)[None], torch.arange(4.0, 8.0)[None], empty, empty, 0)
    assert (loss.metrics["chosen"].item(), loss.metrics["rejected"].item()) == (0, 4)
    assert torch.isfinite(loss.values).all()


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
