"""Losses of the critic, and the normalization of its targets.

All are functions of (values, old_values, returns) and options:

    values: [B, R], V, of the critic in training; carries the gradient.
    old_values: [B, R], of the critic before the update.
    returns: [B, R], G.
    clip: largest distance of a value from its old one; None does not clip.
    scale: factor of the loss.

Metrics of all: ``vpred``, V; ``error``, (V - G)^2; ``clipfrac``, 1 where the clipped
branch is the larger.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algos.normalization import Reduce, reduced_sums
from megarl.algos.policy_loss import LossTerms
from megarl.bounds import Positive


def mse(
    values: Tensor, old_values: Tensor, returns: Tensor, *, clip: Positive | None = 0.2, scale: Positive = 0.5
) -> LossTerms:
    """The larger one of the squared errors of the value and of the value clipped to its old one.

    l = scale * max((V - G)^2, (clamp(V, V_old - clip, V_old + clip) - G)^2) of a value V and a
    return G; without a clip, scale * (V - G)^2. Where the clipped branch wins there is no gradient.
    Source: the PPO of openai/baselines and lm-human-preferences.
    """
    return _clipped(values, old_values, returns, torch.square, clip=clip, scale=scale)


def huber(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    *,
    clip: Positive | None = 0.2,
    scale: Positive = 0.5,
    delta: Positive = 10.0,
) -> LossTerms:
    """The squared error, linear for errors above delta so that outliers weigh less; clipped as mse.

    l = scale * max(h(V - G), h(clamp(V, V_old - clip, V_old + clip) - G)) of a value V and a return
    G, with h(e) = e^2 where |e| <= delta, else delta * (2 * |e| - delta). Source: AReaL's critic;
    Huber, "Robust estimation of a location parameter" (1964), whose function is h / 2.

    Args:
        delta: error from which the loss is linear.
    """

    def penalty(error: Tensor) -> Tensor:
        size = error.abs()
        return torch.where(size <= delta, error.square(), delta * (2 * size - delta))

    return _clipped(values, old_values, returns, penalty, clip=clip, scale=scale)


def _clipped(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    penalty: Callable[[Tensor], Tensor],
    *,
    clip: float | None,
    scale: float,
) -> LossTerms:
    error = values - returns
    unclipped = largest = penalty(error)
    if clip is not None:
        clipped = torch.clamp(values, old_values - clip, old_values + clip)
        largest = torch.maximum(unclipped, penalty(clipped - returns))
    metrics = {
        "vpred": values.detach(),
        "error": error.detach().square(),
        "clipfrac": (largest > unclipped).to(values.dtype),
    }
    return LossTerms(values=scale * largest, metrics=metrics)


@dataclass(frozen=True, kw_only=True)
class ValueMoments:
    """Running moments of the returns: the critic learns normalised returns, and its values are denormalised.

    Moving averages that start at 0, of the returns, of their squares and of the
    constant 1 (``weight``).
    """

    mean: float = 0.0
    square: float = 0.0
    weight: float = 0.0

    def update(self, returns: Tensor, response_mask: Tensor, reduce: Reduce, *, beta: float = 0.99995) -> ValueMoments:
        """The moments of the returns, with which they are normalised, after another batch.

        m <- beta * m + (1 - beta) * mean over the batch, of the returns, of their squares and of 1.
        A batch without tokens, or with a return that is not finite, changes nothing. Source: AReaL,
        exponential running moments; PopArt (van Hasselt et al., 2016).
        """
        counted = returns[response_mask].double()
        count = counted.new_tensor(counted.numel())
        number, total, squares = reduced_sums(reduce, count, counted.sum(), counted.square().sum())
        if number == 0 or not math.isfinite(squares):
            return self
        return ValueMoments(
            mean=beta * self.mean + (1 - beta) * (total / number),
            square=beta * self.square + (1 - beta) * (squares / number),
            weight=beta * self.weight + (1 - beta),
        )

    def mean_and_std(self, *, eps: float = 1e-5) -> tuple[float, float]:
        """The averages over max(weight, eps), in units of reward, with a variance of 0.01 at least."""
        weight = max(self.weight, eps)
        mean = self.mean / weight
        return mean, math.sqrt(max(self.square / weight - mean * mean, 0.01))

    def normalise(self, returns: Tensor, *, eps: float = 1e-5) -> Tensor:
        """(returns - mean) / std, within +-5."""
        mean, std = self.mean_and_std(eps=eps)
        return ((returns - mean) / std).clamp(-5.0, 5.0)

    def denormalise(self, values: Tensor, *, eps: float = 1e-5) -> Tensor:
        """values * std + mean, in units of reward."""
        mean, std = self.mean_and_std(eps=eps)
        return values * std + mean
