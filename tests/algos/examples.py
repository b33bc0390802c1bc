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

POLICY_LOSSES: Mapping[str, PolicyLoss] = {
    "ppo": policy_loss.ppo,
    "ppo clip-higher": partial(policy_loss.ppo, clip=0.1, clip_high=0.28),
    "ppo dual clip": partial(policy_loss.ppo, dual_clip=1.4),
    "ppo delta": partial(policy_loss.ppo, delta=1.5),
    "ppo ratio clamp": partial(policy_loss.ppo, ratio_clamp=(0.5, 1.6)),
    "gspo": partial(policy_loss.gspo, clip=0.1, clip_high=0.15),
    "gspo dual clip": partial(policy_loss.gspo, clip=0.1, clip_high=0.15, dual_clip=1.2),
    "cispo": partial(policy_loss.cispo, clip=0.2, clip_high=0.3),
    "cispo upper": partial(policy_loss.cispo_upper, max_ratio=1.3),
    "sapo": policy_loss.sapo,
    "gmpo": partial(policy_loss.gmpo, clip=0.3),
    "reinforce": policy_loss.reinforce,
}
VALUE_LOSSES: Mapping[str, Callable[[Tensor, Tensor, Tensor], LossTerms]] = {
    "mse": value_loss.mse,
    "mse unclipped": partial(value_loss.mse, clip=None, scale=1.0),
    "huber": partial(value_loss.huber, delta=0.7),
    "huber unclipped": partial(value_loss.huber, clip=None, delta=0.7),
}
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
