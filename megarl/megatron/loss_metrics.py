"""What a loss tells of a micro-batch, and what the micro-batches of all ranks make of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.algos.aggregation import weighted_sum
from megarl.algos.normalization import on_mask
from megarl.algos.policy_loss import LossTerms

Named = Mapping[str, Tensor]
"""Detached scalars by name."""


def _none() -> Named:
    return {}


@dataclass(frozen=True, kw_only=True)
class Measures:
    """Of a micro-batch.

    Args:
        sums: a step's are their sums.
        means: of weighted values; a step's are their sums over that of ``weight``.
        squares: likewise, of squares; those of ``name`` and the mean ``name_mean`` make the variance of a step.
        weight: of all that counts; None where there are no means.
        maxima, minima: a step's are the largest and the smallest; infinite in a micro-batch where nothing counts.
    """

    sums: Named = field(default_factory=_none)
    means: Named = field(default_factory=_none)
    squares: Named = field(default_factory=_none)
    weight: Tensor | None = None
    maxima: Named = field(default_factory=_none)
    minima: Named = field(default_factory=_none)


def measured(terms: LossTerms, mask: Tensor, weights: Tensor) -> Measures:
    """What the terms of a micro-batch tell.

    Sums are in float64, in which squares of numbers that are near each other keep their difference.

    Args:
        terms: [B, R].
        mask: [B, R] bool, what counts.
        weights: [B, R], alike on all tokens of the step.
    """
    counting = on_mask(weights.double(), mask)

    def mean(values: Tensor) -> Tensor:
        return weighted_sum(values.double(), counting)

    def counted(values: Tensor, bound: float) -> Tensor:
        return torch.cat([values[mask], values.new_full((1,), bound)])

    spreads = terms.spreads.items()
    return Measures(
        means={name: mean(values) for name, values in terms.metrics.items()}
        | {f"{name}_mean": mean(values) for name, values in spreads},
        squares={name: mean(values.double().square()) for name, values in spreads},
        weight=counting.sum(),
        maxima={name: counted(values, -math.inf).max() for name, values in spreads},
        minima={name: counted(values, math.inf).min() for name, values in spreads},
    )


def combined(parts: Sequence[Measures], group: dist.ProcessGroup) -> dict[str, float]:
    """What a step tells: sums, means, ``{name}_var``, ``{name}_max`` and ``{name}_min``; collective.

    A step in which nothing counts has neither means nor extremes.

    Args:
        parts: of this rank's micro-batches. Every rank has the same kinds of them, however many of each.
        group: the ranks that share the step.
    """
    told = _over_all([part.sums for part in parts], dist.ReduceOp.SUM, group)
    weighed = [part for part in parts if part.weight is not None]
    weight = _over_all([{"": part.weight} for part in weighed if part.weight is not None], dist.ReduceOp.SUM, group)
    whole = weight.get("", 0.0)
    if whole:
        means = _over_all([part.means for part in weighed], dist.ReduceOp.SUM, group)
        told |= {name: total / whole for name, total in means.items()}
        squares = _over_all([part.squares for part in weighed], dist.ReduceOp.SUM, group)
        told |= {f"{name}_var": max(total / whole - told[f"{name}_mean"] ** 2, 0.0) for name, total in squares.items()}
    maxima = _over_all([part.maxima for part in parts], dist.ReduceOp.MAX, group)
    minima = _over_all([part.minima for part in parts], dist.ReduceOp.MIN, group)
    told |= {f"{name}_max": value for name, value in maxima.items() if math.isfinite(value)}
    told |= {f"{name}_min": value for name, value in minima.items() if math.isfinite(value)}
    return told


_WITHIN: Mapping[dist.ReduceOp.RedOpType, Callable[[Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.sum,
    dist.ReduceOp.MAX: torch.amax,
    dist.ReduceOp.MIN: torch.amin,
}


def _over_all(parts: Sequence[Named], operation: Any, group: dist.ProcessGroup) -> dict[str, float]:
    """One number per name, of all micro-batches of all ranks."""
    names = sorted({name for part in parts for name in part})
    if not names:
        return {}
    own = [torch.stack([part[name].double() for part in parts if name in part]) for name in names]
    total = torch.stack([_WITHIN[operation](values) for values in own])
    dist.all_reduce(total, op=operation, group=group)
    return dict(zip(names, total.tolist(), strict=True))
