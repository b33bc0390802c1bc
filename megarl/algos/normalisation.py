"""Moments over all ranks, and whitening with them.

Statistics are taken in float64 and in two passes: the mean, then the squares around it. Every rank calls a reduction
the same number of times, whether it has rows or not: one that left it out would stop the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

Reduce = Callable[[Tensor], Tensor]
"""Sums a small float64 vector over the ranks that share a batch; collective: every rank calls, with data or without."""

Form = Literal["var_plus_eps", "var_clamp", "std_plus_eps"]
"""The divisor: sqrt(variance + eps), sqrt(max(variance, eps)), or sqrt(variance) + eps."""

_DIVISORS: Final[dict[Form, Callable[[Tensor, float], Tensor]]] = {
    "var_plus_eps": lambda variance, eps: (variance + eps).sqrt(),
    "var_clamp": lambda variance, eps: variance.clamp(min=eps).sqrt(),
    "std_plus_eps": lambda variance, eps: variance.sqrt() + eps,
}


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Which rows belong together, over all ranks.

    Args:
        index: [B] int64, the group of each of this rank's rows, from 0 on.
        count: of groups, on all ranks together.
    """

    index: Tensor
    count: int


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Of all counting entries on all ranks: their number, mean and population variance.

    Float64: scalars, or [G], by group.
    """

    count: Tensor
    mean: Tensor
    variance: Tensor

    @property
    def sample_variance(self) -> Tensor:
        """The variance with Bessel's correction; that of one entry is 0."""
        return self.variance * self.count / (self.count - 1).clamp(min=1)

    def variance_of(self, ddof: int) -> Tensor:
        """The variance with 0 or 1 degrees of freedom taken off the number of entries."""
        return self.sample_variance if ddof else self.variance


def masked_moments(values: Tensor, mask: Tensor, reduce: Reduce) -> Moments:
    """Over all entries that count; all 0 where nothing counts anywhere.

    Args:
        values: this rank's entries, any shape.
        mask: bool, same shape.
        reduce: called twice.
    """
    together = Groups(index=torch.zeros(mask.shape[:1], dtype=torch.int64, device=mask.device), count=1)
    moments = grouped_moments(values, mask, together, reduce)
    return Moments(count=moments.count[0], mean=moments.mean[0], variance=moments.variance[0])


def grouped_moments(values: Tensor, mask: Tensor, groups: Groups, reduce: Reduce) -> Moments:
    """Over the entries that count of each group's rows; all 0 in a group in which nothing counts.

    Args:
        values: [B, ...], this rank's rows.
        mask: bool, same shape.
        groups: of the rows.
        reduce: called twice.
    """
    counted = values[mask].double()
    owner = groups.index.reshape(-1, *[1] * (mask.ndim - 1)).expand_as(mask)[mask]

    def over_ranks(*entries: Tensor) -> Tensor:
        sums = [entry.new_zeros(groups.count).index_add(0, owner, entry) for entry in entries]
        return reduce(torch.cat(sums)).reshape(len(sums), groups.count)

    count, total = over_ranks(torch.ones_like(counted), counted)
    mean = total / count.clamp(min=1)
    (squares,) = over_ranks((counted - mean[owner]).square())
    return Moments(count=count, mean=mean, variance=squares / count.clamp(min=1))


def standardise(
    values: Tensor,
    mask: Tensor,
    reduce: Reduce,
    *,
    keep_mean: bool = False,
    ddof: int = 0,
    form: Form = "var_plus_eps",
    mean_only: bool = False,
    eps: float = 1e-8,
) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8), with the moments of the counting entries on all ranks.

    Entries off the mask go through the same map: callers set them to what they want.

    Args:
        values: [B, R], this rank's rows.
        mask: [B, R] bool.
        reduce: called twice, whether this rank has tokens or not.
        keep_mean: add the mean again.
        ddof: degrees of freedom that are taken off the number of entries in the variance.
        form: of the divisor.
        mean_only: divide by 1.
        eps: of the divisor.

    Returns:
        [B, R], in the dtype of ``values``.
    """
    moments = masked_moments(values, mask, reduce)
    divisor = torch.ones_like(moments.mean) if mean_only else _DIVISORS[form](moments.variance_of(ddof), eps)
    whitened = (values.double() - moments.mean) / divisor
    return (whitened + moments.mean if keep_mean else whitened).to(values.dtype)


def on_mask(values: Tensor, mask: Tensor) -> Tensor:
    """The values, and 0 off the mask, where they may be anything."""
    return torch.where(mask, values, torch.zeros_like(values))
