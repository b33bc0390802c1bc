"""Every loss against finite differences, in float64, on masks with gaps and an empty row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megarl.algos import kl, preference_loss
from megarl.algos.aggregation import sequence_mean, weighted_sum
from megarl.algos.policy_loss import LossTerms, weighted, with_term
from tests.algos.examples import AGGREGATIONS, MASK, POLICY_LOSSES, VALUE_LOSSES, step_weights, tokens, total
from tests.algos.inputs import numbers

SEMIGRADIENTS = {"cispo", "cispo upper"}
"""Their importance weight has no gradient, though it depends on the policy."""


def check(function: Callable[[Tensor], Tensor], *inputs: Tensor) -> None:
    """Central differences of a scalar, whatever kinks it has elsewhere."""
    assert torch.autograd.gradcheck(function, [x.clone().requires_grad_() for x in inputs], eps=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "aggregate"),
    [(name, "token_mean") for name in sorted(POLICY_LOSSES.keys() - SEMIGRADIENTS)]
    + [("ppo", aggregate) for aggregate in AGGREGATIONS if aggregate != "token_mean"],
)
@pytest.mark.parametrize("seed", range(3))
def test_policy_losses(name: str, aggregate: str, seed: int) -> None:
    new, old, advantages = tokens(seed)
    check(lambda x: total(POLICY_LOSSES[name](x, old, advantages, MASK), MASK, AGGREGATIONS[aggregate]), new)


@pytest.mark.parametrize("name", sorted(SEMIGRADIENTS))
def test_the_gradient_of_cispo_does_not_flow_through_the_ratio(name: str) -> None:
    new, old, advantages = tokens(0)
    frozen = POLICY_LOSSES[name](new, old, advantages, MASK).values / new
    leaf = new.clone().requires_grad_()
    (grad,) = torch.autograd.grad(total(POLICY_LOSSES[name](leaf, old, advantages, MASK), MASK), leaf)
    check(lambda x: weighted_sum(frozen * x, step_weights(MASK)), new)
    torch.testing.assert_close(grad, torch.where(MASK, frozen, 0.0) / MASK.sum())


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES.keys() - SEMIGRADIENTS))
def test_policy_losses_with_weights_entropy_and_kl(name: str) -> None:
    new, old, advantages = tokens(3)
    ref, weights = numbers(*MASK.shape, seed=9), numbers(*MASK.shape, seed=10).relu()

    def composed(x: Tensor) -> Tensor:
        loss = weighted(POLICY_LOSSES[name](x, old, advantages, MASK), weights)
        loss = with_term(loss, "kl", kl.k3(x, ref), coef=0.3)
        return total(with_term(loss, "entropy", -x.exp() * x, coef=-0.1), MASK, sequence_mean)

    check(composed, new)


@pytest.mark.parametrize("estimator", [kl.k1, kl.k2, kl.k3, kl.absolute])
def test_a_kl_penalty_in_the_loss(estimator: Callable[[Tensor, Tensor], Tensor]) -> None:
    new, ref, _ = tokens(5)
    nothing = LossTerms(values=torch.zeros_like(new), metrics={})
    check(lambda x: total(with_term(nothing, "kl", estimator(x, ref), coef=0.2), MASK), new)


def test_the_entropy_of_a_distribution() -> None:
    """d entropy / d logits = p * (sum of p z - z), here as a bonus in the loss."""
    logits = numbers(*MASK.shape, 3, seed=0)
    nothing = LossTerms(values=torch.zeros(MASK.shape, dtype=torch.float64), metrics={})

    def bonus(z: Tensor) -> Tensor:
        log_p = torch.log_softmax(z, -1)
        return total(with_term(nothing, "entropy", -(log_p.exp() * log_p).sum(-1), coef=-0.05), MASK)

    check(bonus, logits)
    leaf = logits.clone().requires_grad_()
    (grad,) = torch.autograd.grad(bonus(leaf), leaf)
    p = torch.softmax(logits, -1)
    of_entropy = p * ((p * logits).sum(-1, keepdim=True) - logits)
    torch.testing.assert_close(grad, -0.05 * of_entropy * MASK[..., None] / MASK.sum())


@pytest.mark.parametrize("name", VALUE_LOSSES)
@pytest.mark.parametrize("seed", range(3))
def test_value_losses(name: str, seed: int) -> None:
    now, old, returns = tokens(seed)
    check(lambda x: total(VALUE_LOSSES[name](x, old, returns), MASK), now)


@pytest.mark.parametrize("kind", ["logsigmoid", "logexp"])
def test_pairwise_loss(kind: str) -> None:
    chosen, rejected, margins = (numbers(5, seed=seed) for seed in range(3))
    check(
        lambda c, r: preference_loss.pairwise(c, r, margins.abs(), margin=True, kind=kind, centering=0.1).values.mean(),  # type: ignore[arg-type]
        chosen,
        rejected,
    )


def test_best_of_n_loss() -> None:
    best = torch.tensor([0, 3, 1])
    check(lambda scores: preference_loss.best_of_n(scores, best).values.mean(), numbers(3, 4, seed=0))


def test_span_loss() -> None:
    ids = torch.tensor([[5, 6, 7, 8, 0, 0], [5, 6, 9, 9, 9, 0], [4, 4, 4, 0, 0, 0]])
    other = torch.tensor([[5, 6, 3, 0, 0, 0], [5, 6, 9, 2, 2, 2], [4, 4, 4, 0, 0, 0]])
    spans = preference_loss.spans_of(ids, other, pad=0)
    check(lambda c, r: preference_loss.span(c, r, spans).values.mean(), numbers(3, 6, seed=0), numbers(3, 6, seed=1))
