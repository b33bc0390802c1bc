"""Normalisation of what the critic learns, by exponential moving moments of the returns.

The critic learns returns of mean 0 and variance 1; its values are brought back into units of reward for the advantages.
Source: AReaL's exponential running moments, after PopArt (van Hasselt et al., 2016).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algos.normalisation import Reduce

VARIANCE_FLOOR = 1e-2
LIMIT = 5.0


@dataclass(frozen=True, kw_only=True)
class ValueMoments:
    """Moving averages that begin at 0.

    Args:
        mean: of the returns.
        square: of their squares.
        weight: what the averages of a constant 1 would be by now, of which ``mean`` and ``square`` are in units.
    """

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
    """The moments after another batch, whose tokens count alike; one without a token, or with a return that is not
    finite, changes nothing.

    m <- beta * m + (1 - beta) * mean over the batch, of the returns, of their squares and of 1. Source: AReaL,
    exponential running moments; PopArt (van Hasselt et al., 2016).

    Args:
        moments: so far.
        returns: [B, R], units of reward.
        response_mask: [B, R] bool.
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
    """Mean and deviation: the averages over max(weight, eps), with a variance of 0.01 at least.

    Args:
        moments: of at least one batch; before that, the mean is 0.
        eps: least weight.
    """
    weight = max(moments.weight, eps)
    mean = moments.mean / weight
    return ValueScale(mean=mean, deviation=math.sqrt(max(moments.square / weight - mean * mean, VARIANCE_FLOOR)))


def normalised(values: Tensor, scale: ValueScale) -> Tensor:
    """(values - mean) / deviation, within +-5: returns for the critic to learn."""
    return ((values - scale.mean) / scale.deviation).clamp(-LIMIT, LIMIT)


def denormalised(values: Tensor, scale: ValueScale) -> Tensor:
    """values * deviation + mean: what the critic says, in units of reward."""
    return values * scale.deviation + scale.mean
