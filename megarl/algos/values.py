"""Losses of the critic.

All are functions of (values, old_values, returns) and options:

    values: [B, R], V, of the critic in training; carries the gradient.
    old_values: [B, R], of the critic before the update.
    returns: [B, R], G.

Metrics of all: ``vpred``, V; ``error``, (V - G)^2; ``clipfrac``, 1 where the clipped branch is the larger.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megarl.algos.terms import LossTerms


def mse(
    values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None = 0.2, scale: float = 0.5
) -> LossTerms:
    """The squared error, of the value or of the value kept near its old one, whichever is the larger.

    l = scale * max((V - G)^2, (clamp(V, V_old - clip, V_old + clip) - G)^2) of a value V and a return G; without a
    clip, scale * (V - G)^2. Where the clipped branch wins there is no gradient. Source: the PPO of openai/baselines and
    lm-human-preferences.

    Args:
        values, old_values, returns: see the module.
        clip: how far a value may move from its old one in an update; None: as far as it will.
        scale: loss per squared error.
    """
    return _clipped(values, old_values, returns, torch.square, clip=clip, scale=scale)


def huber(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    *,
    clip: float | None = 0.2,
    scale: float = 0.5,
    delta: float = 10.0,
) -> LossTerms:
    """The squared error that grows linearly from an error of delta on, so that outliers pull less; clipped as mse.

    l = scale * max(h(V - G), h(clamp(V, V_old - clip, V_old + clip) - G)) of a value V and a return G, with h(e) = e^2
    where |e| <= delta, else delta * (2 * |e| - delta). Source: AReaL's critic; Huber, "Robust estimation of a location
    parameter" (1964), whose function is h / 2.

    Args:
        values, old_values, returns: see the module.
        clip: how far a value may move from its old one in an update; None: as far as it will.
        scale: loss per squared error.
        delta: error from which on the loss is linear.
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
