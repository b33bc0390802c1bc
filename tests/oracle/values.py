"""The critic's losses: one number per token of one response, [R]."""

from __future__ import annotations

import torch
from torch import Tensor

Loss = tuple[Tensor, Tensor]
"""The loss of each token, and whether clipping made it what it is (0 or 1)."""


def mse(values: Tensor, old: Tensor, returns: Tensor, *, clip: float | None = 0.2, scale: float = 0.5) -> Loss:
    """scale * max((V - G)^2, (clamp(V, V_old - clip, V_old + clip) - G)^2)."""
    near = _near(values, old, clip)
    return _larger((values - returns) ** 2, (near - returns) ** 2, scale)


def huber(
    values: Tensor,
    old: Tensor,
    returns: Tensor,
    *,
    clip: float | None = 0.2,
    scale: float = 0.5,
    delta: float = 10.0,
) -> Loss:
    """The same, the square of the error e beyond delta being delta * (2 |e| - delta)."""

    def of(error: Tensor) -> Tensor:
        size = error.abs()
        return torch.where(size <= delta, size**2, delta * (2 * size - delta))

    return _larger(of(values - returns), of(_near(values, old, clip) - returns), scale)


def _near(values: Tensor, old: Tensor, clip: float | None) -> Tensor:
    return values if clip is None else old + (values - old).clamp(-clip, clip)


def _larger(free: Tensor, bounded: Tensor, scale: float) -> Loss:
    return scale * torch.where(bounded > free, bounded, free), (bounded > free).float()
