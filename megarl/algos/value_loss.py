"""Losses of the critic, and the normalization of its targets.

All are functions of (values, old_values, returns) and options:

    values: [B, R], V, of the critic in training; carries the gradient.
    old_values: [B, R], of the critic before the update.
    returns: [B, R], G.
    clip: half width of the interval in which a value may move in one step; None does not clip.
    scale: factor of the loss.

Metrics of all: ``vpred``, V; ``error``, (V - G)^2; ``clipfrac``, 1 where the clipped branch is the larger.

The critic learns returns of mean 0 and variance 1; its values are brought back into units of reward for the advantages.
Source: AReaL's exponential running moments, after PopArt (van Hasselt et al., 2016).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algos.normalization import Reduce
from megarl.algos.policy_loss import LossTerms
from megarl.bounds import Positive


def mse(
    values: Tensor, old_values: Tensor, returns: Tensor, *, clip: Positive | None = 0.2, scale: Positive = 0.5
) -> LossTerms:
    """The squared error, of the value or of the value kept near its old one, whichever is the larger.

    l = scale * max((V - G)^2, (clamp(V, V_old - clip, V_old + clip) - G)^2) of a value V and a return G; without a
    clip, scale * (V - G)^2. Where the clipped branch wins there is no gradient. Source: the PPO of openai/baselines and
    lm-human-preferences.
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
    """The squared error that grows linearly from an error of delta on, so that outliers pull less; clipped as mse.

    l = scale * max(h(V - G), h(clamp(V, V_old - clip, V_old + clip) - G)) of a value V and a return G, with h(e) = e^2
    where |e| <= delta, else delta * (2 * |e| - delta). Source: AReaL's critic; Huber, "Robust estimation of a location
    parameter" (1964), whose function is h / 2.

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
    free = penalty(error)
    largest = free
    if clip is not None:
        kept_near = torch.clamp(values, old_values - clip, old_values + clip)
        largest = torch.maximum(free, penalty(kept_near - returns))
    return LossTerms(
        values=scale * largest,
        metrics={
            "vpred": values.detach(),
            "error": error.detach().square(),
            "clipfrac": (largest > free).to(values.dtype),
        },
    )


VARIANCE_FLOOR = 1e-2
LIMIT = 5.0


@dataclass(frozen=True, kw_only=True)
class ValueMoments:
    """Moving averages that begin at 0, of the returns, of their squares and of the constant 1 (``weight``)."""

    mean: float = 0.0
    square: float = 0.0
    weight: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ValueScale:
    """Mean and deviation of the returns, in units of reward."""

    mean: float
    deviation: float


def updated(
    moments: ValueMoments, returns: Tensor, response_mask: Tensor, reduce: Reduce, *, beta: float = 0.99995
) -> ValueMoments:
    """The moments after another batch; one without a token, or with a return that is not finite, changes nothing.

    m <- beta * m + (1 - beta) * mean over the batch, of the returns, of their squares and of 1. Source: AReaL,
    exponential running moments; PopArt (van Hasselt et al., 2016).

    Args:
        returns: [B, R], units of reward.
        reduce: called once, with tokens or without.
        beta: decay per batch.
    """
    own = returns[response_mask].double()
    sums = reduce(torch.stack([own.new_tensor(own.numel()), own.sum(), own.square().sum()]))
    number, total, squares = (float(x) for x in sums)
    if number == 0 or not math.isfinite(squares):
        return moments

    def moved(average: float, new: float) -> float:
        return beta * average + (1 - beta) * new

    return ValueMoments(
        mean=moved(moments.mean, total / number),
        square=moved(moments.square, squares / number),
        weight=moved(moments.weight, 1.0),
    )


def scale_of(moments: ValueMoments, *, eps: float = 1e-5) -> ValueScale:
    """Mean and deviation: the averages over max(weight, eps), with a variance of 0.01 at least."""
    weight = max(moments.weight, eps)
    mean = moments.mean / weight
    return ValueScale(mean=mean, deviation=math.sqrt(max(moments.square / weight - mean * mean, VARIANCE_FLOOR)))


def normalised(values: Tensor, scale: ValueScale) -> Tensor:
    """(values - mean) / deviation, within +-5: returns for the critic to learn."""
    return ((values - scale.mean) / scale.deviation).clamp(-LIMIT, LIMIT)


def denormalised(values: Tensor, scale: ValueScale) -> Tensor:
    """values * deviation + mean: the critic's values in units of reward."""
    return values * scale.deviation + scale.mean
