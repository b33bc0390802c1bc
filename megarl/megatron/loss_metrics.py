"""Metrics of a loss: collected per micro-batch, reduced over the micro-batches and replicas of an optimizer step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.algos.aggregation import weighted_sum
from megarl.algos.metrics import Means
from megarl.algos.normalization import on_mask
from megarl.algos.policy_loss import LossTerms

Named = Mapping[str, Tensor]
"""Detached scalars by name."""


@dataclass(frozen=True, kw_only=True)
class LossMetrics:
    """The metrics of a micro-batch.

    Args:
        sums: terms of the step's sums.
        means: weighted sums and sums of weights; a name without weight in the step is left out.
        squares: weighted sums of squares, which give variances with the means ``name_mean``.
        maxima, minima: extremes, infinite where the mask is empty.
    """

    sums: Named = field(default_factory=dict[str, Tensor])
    means: Means = field(default_factory=dict[str, tuple[Tensor, Tensor]])
    squares: Named = field(default_factory=dict[str, Tensor])
    maxima: Named = field(default_factory=dict[str, Tensor])
    minima: Named = field(default_factory=dict[str, Tensor])


def collect(terms: LossTerms, mask: Tensor, weights: Tensor) -> LossMetrics:
    """Collects the metrics of a micro-batch in float64, which keeps variances of nearly equal numbers.

    Args:
        mask: [B, R] bool, the terms to report.
        weights: [B, R], the same number on all tokens of the step.
    """
    weights = on_mask(weights.double(), mask)
    total_weight = weights.sum()
    named = dict(terms.metrics)
    squares: dict[str, Tensor] = {}
    maxima: dict[str, Tensor] = {}
    minima: dict[str, Tensor] = {}
    for name, values in terms.spreads.items():
        named[f"{name}_mean"] = values
        squares[name] = weighted_sum(values.double().square(), weights)
        counted = values[mask]
        infinity = values.new_full((1,), math.inf)
        maxima[name] = torch.cat([counted, -infinity]).max()
        minima[name] = torch.cat([counted, infinity]).min()
    means: dict[str, tuple[Tensor, Tensor]] = {}
    for name, values in named.items():
        means[name] = weighted_sum(values.double(), weights), total_weight
    return LossMetrics(means=means, squares=squares, maxima=maxima, minima=minima)


def reduce_metrics(parts: Sequence[LossMetrics], group: dist.ProcessGroup) -> dict[str, float]:
    """Reduces to a step's sums, means, ``{name}_var``, ``{name}_max`` and ``{name}_min``; collective.

    A step with empty masks has neither means nor extremes.

    Args:
        parts: metrics of this rank's micro-batches; the names are the same on every rank.
    """
    reduced = _over_all([part.sums for part in parts], dist.ReduceOp.SUM, group)
    named_sums: list[Named] = []
    named_weights: list[Named] = []
    for part in parts:
        named_sums.append({name: total for name, (total, _) in part.means.items()})
        named_weights.append({name: weight for name, (_, weight) in part.means.items()})
    sums = _over_all(named_sums, dist.ReduceOp.SUM, group)
    weights = _over_all(named_weights, dist.ReduceOp.SUM, group)
    for name, weight in weights.items():
        if weight:
            reduced[name] = sums[name] / weight
    squares = _over_all([part.squares for part in parts], dist.ReduceOp.SUM, group)
    for name, total in squares.items():
        mean = f"{name}_mean"
        if weights[mean]:
            reduced[f"{name}_var"] = max(total / weights[mean] - reduced[mean] ** 2, 0.0)
    maxima = _over_all([part.maxima for part in parts], dist.ReduceOp.MAX, group)
    minima = _over_all([part.minima for part in parts], dist.ReduceOp.MIN, group)
    for suffix, extremes in (("max", maxima), ("min", minima)):
        for name, value in extremes.items():
            if math.isfinite(value):
                reduced[f"{name}_{suffix}"] = value
    return reduced


_WITHIN: Mapping[dist.ReduceOp.RedOpType, Callable[[Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.sum,
    dist.ReduceOp.MAX: torch.amax,
    dist.ReduceOp.MIN: torch.amin,
}


def _over_all(parts: Sequence[Named], operation: Any, group: dist.ProcessGroup) -> dict[str, float]:
    """Reduces to one number per name, over all micro-batches of all ranks."""
    values: dict[str, list[Tensor]] = defaultdict(list)
    for part in parts:
        for name, value in part.items():
            values[name].append(value.double())
    if not values:
        return {}
    names = sorted(values)
    total = torch.stack([_WITHIN[operation](torch.stack(values[name])) for name in names])
    dist.all_reduce(total, op=operation, group=group)
    return dict(zip(names, total.tolist(), strict=True))
