"""Normalisation with statistics over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Reduce = Callable[[Tensor], Tensor]
"""Sums a small float64 vector over the ranks that share a batch; collective: every rank calls, with data or without."""

VARIANCE_FLOOR = 1e-8


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Of all counting entries on all ranks: their number, mean and population variance, float64 scalars."""

    count: Tensor
    mean: Tensor
    variance: Tensor

    @property
    def sample_variance(self) -> Tensor:
        """The variance with Bessel's correction; that of one entry is 0."""
        return self.variance * self.count / (self.count - 1).clamp(min=1)


def masked_moments(values: Tensor, mask: Tensor, reduce: Reduce) -> Moments:
    """Two passes in float64: count and sum, then the centred squares; both 0 where nothing counts anywhere.

    Args:
        values: this rank's entries, any shape.
        mask: bool, same shape.
        reduce: called twice.
    """
    counted = values[mask].double()
    count, total = reduce(torch.stack([counted.new_tensor(counted.numel()), counted.sum()])).unbind()
    mean = total / count.clamp(min=1)
    (squares,) = reduce((counted - mean).square().sum().reshape(1)).unbind()
    return Moments(count=count, mean=mean, variance=squares / count.clamp(min=1))


def whiten(values: Tensor, mask: Tensor, reduce: Reduce) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8) with the population moments over all ranks; 0 off the mask.

    Args:
        values: [B, R], this rank's rows.
        mask: [B, R] bool.
        reduce: called twice, whether this rank has tokens or not.

    Returns:
        [B, R], in the dtype of ``values``.
    """
    moments = masked_moments(values, mask, reduce)
    scale = (moments.variance + VARIANCE_FLOOR).rsqrt()
    whitened = ((values.double() - moments.mean) * scale).to(values.dtype)
    return torch.where(mask, whitened, torch.zeros_like(whitened))
