"""Losses against finite differences, in float64, on masks with gaps and an empty row.

The gradients of single losses are compared with the oracle's in test_losses, and with the vectors'.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megarl.algos import kl, preference_loss
from megarl.algos.aggregation import sequence_mean
from megarl.algos.policy_loss import weighted, with_term
from tests.algos.examples import MASK, POLICY_LOSSES, tokens, total
from tests.algos.inputs import numbers

SEMIGRADIENTS = {"cispo", "cispo_upper"}
"""Their importance weight has no gradient, though it depends on the policy."""


def check(function: Callable[[Tensor], Tensor], *inputs: Tensor) -> None:
    """Central differences of a scalar, whatever kinks it has elsewhere."""
    assert torch.autograd.gradcheck(function, [x.clone().requires_grad_() for x in inputs], eps=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES.keys() - SEMIGRADIENTS))
def test_policy_losses_with_weights_entropy_and_kl(name: str) -> None:
    new, old, advantages = tokens(3)
    ref, weights = numbers(*MASK.shape, seed=9), numbers(*MASK.shape, seed=10).relu()

    def composed(x: Tensor) -> Tensor:
        loss = weighted(POLICY_LOSSES[name](x, old, advantages, MASK), weights)
        loss = with_term(loss, "kl", kl.k3(x, ref), coef=0.3)
        return total(with_term(loss, "entropy", -x.exp() * x, coef=-0.1), MASK, sequence_mean)

    check(composed, new)


def test_span_loss() -> None:
    ids = torch.tensor([[5, 6, 7, 8, 0, 0], [5, 6, 9, 9, 9, 0], [4, 4, 4, 0, 0, 0]])
    other = torch.tensor([[5, 6, 3, 0, 0, 0], [5, 6, 9, 2, 2, 2], [4, 4, 4, 0, 0, 0]])
    check(
        lambda c, r: preference_loss.span(c, r, ids, other, 0).values.mean(),
        numbers(3, 6, seed=0),
        numbers(3, 6, seed=1),
    )
