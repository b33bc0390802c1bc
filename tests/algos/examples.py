"""Shared by the tests of the losses: losses with relevant options, and batches with gaps and empty rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megarl.algos import aggregation, policy_loss, value_loss
from megarl.algos.aggregation import weighted_sum
from megarl.algos.policy_loss import LossTerms
from tests.algos.inputs import numbers

PolicyLoss = Callable[[Tensor, Tensor, Tensor, Tensor], LossTerms]

OPTIONS: Mapping[str, dict[str, Any]] = {
    "ppo": {},
    "ppo clip-higher": {"clip": 0.1, "clip_high": 0.28},
    "ppo dual clip": {"dual_clip": 1.4},
    "ppo delta": {"delta": 1.5},
    "ppo ratio clamp": {"ratio_clamp": (0.5, 1.6)},
    "gspo": {"clip": 0.1, "clip_high": 0.15},
    "gspo dual clip": {"clip": 0.1, "clip_high": 0.15, "dual_clip": 1.2},
    "cispo": {"clip": 0.2, "clip_high": 0.3},
    "cispo_upper": {"max_ratio": 1.3},
    "sapo": {},
    "gmpo": {"clip": 0.3},
    "reinforce": {},
    "mse": {},
    "mse unclipped": {"clip": None, "scale": 1.0},
    "huber": {"delta": 0.7},
    "huber unclipped": {"clip": None, "delta": 0.7},
}
"""Of each case, which begins with the name of the loss."""


def cases(module: Any, **others: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """The losses of a module with the options of each case, or with others."""
    options = {**OPTIONS, **others}
    names = [name for name in options if hasattr(module, name.split()[0])]
    return {name: partial(getattr(module, name.split()[0]), **options[name]) for name in names}


POLICY_LOSSES: Mapping[str, PolicyLoss] = cases(policy_loss)
VALUE_LOSSES: Mapping[str, Callable[[Tensor, Tensor, Tensor], LossTerms]] = cases(value_loss)
AGGREGATIONS: Mapping[str, Callable[..., Tensor]] = {
    "token_mean": aggregation.token_mean,
    "token_sum": aggregation.token_sum,
    "sequence_mean": aggregation.sequence_mean,
    "sequence_sum": aggregation.sequence_sum,
    "sequence_sum_norm": partial(aggregation.sequence_sum_norm, tokens=7),
}
MASK = torch.tensor([[1, 1, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0], [0, 1, 1, 1, 0, 1]]).bool()
"""Gaps, an empty row, a row of one token."""


def tokens(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """new, old and advantages (or values, old values and returns) of the shape of MASK."""
    old = numbers(*MASK.shape, seed=seed)
    return old + 0.4 * numbers(*MASK.shape, seed=seed + 1), old, numbers(*MASK.shape, seed=seed + 2)


def step_weights(mask: Tensor, aggregate: Callable[..., Tensor] = aggregation.token_mean, **step: Any) -> Tensor:
    """The token weights of a whole step, or of part of one with the given totals."""
    totals = {"total_tokens": int(mask.sum()), "total_sequences": int(mask.any(-1).sum()), **step}
    return aggregate(mask, dtype=torch.float64, **totals)


def total(loss: LossTerms, mask: Tensor, aggregate: Callable[..., Tensor] = aggregation.token_mean) -> Tensor:
    """The loss of a step."""
    return weighted_sum(loss.values, step_weights(mask, aggregate))


def gradient(function: PolicyLoss, new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor = MASK) -> Tensor:
    """Of the token mean, with respect to the new log-probabilities."""
    leaf = new.clone().requires_grad_()
    (grad,) = torch.autograd.grad(total(function(leaf, old, advantages, mask), mask), leaf)
    return grad
