"""Metrics of a loss: collected per micro-batch, reduced over the micro-batches and replicas of an optimizer step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
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
        maxima: ``name_max``, and ``name_min`` with the other sign; -infinite where
            the mask is empty.
    """

    sums: Named = field(default_factory=dict[str, Tensor])
    means: Means = field(default_factory=dict[str, tuple[Tensor, Tensor]])
    squares: Named = field(default_factory=dict[str, Tensor])
    maxima: Named = field(default_factory=dict[str, Tensor])


def collect(terms: LossTerms, mask: Tensor, weights: Tensor) -> LossMetrics:
    """Collects the metrics of the terms on the mask in float64, which keeps variances of nearly equal numbers.

    The weights, [B, R], are the same number on all tokens of the step.
    """
    weights = on_mask(weights.double(), mask)
    total_weight = weights.sum()
    named = dict(terms.metrics)
    squares: dict[str, Tensor] = {}
    maxima: dict[str, Tensor] = {}
    for name, values in terms.spreads.items():
        named[f"{name}_mean"] = values
        squares[name] = weighted_sum(values.double().square(), weights)
        maxima[f"{name}_max"] = _largest(values, mask)
        maxima[f"{name}_min"] = _largest(-values, mask)
    means: dict[str, tuple[Tensor, Tensor]] = {}
    for name, values in named.items():
        means[name] = weighted_sum(values.double(), weights), total_weight
    return LossMetrics(means=means, squares=squares, maxima=maxima)


def _largest(values: Tensor, mask: Tensor) -> Tensor:
    """Returns the largest value on the mask, -infinite without any."""
    nothing = values.new_full((1,), -math.inf)
    return torch.cat([values.masked_fill(~mask, -math.inf).flatten(), nothing]).max()


def reduce_metrics(parts: Sequence[LossMetrics], group: dist.ProcessGroup) -> dict[str, float]:
    """Reduces to a step's sums, means, ``{name}_var``, ``{name}_max`` and ``{name}_min``; collective.

    The names are the same on every rank. A step with empty masks has neither means nor extremes.
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
    for name, value in maxima.items():
        if math.isfinite(value):
            reduced[name] = -value if name.endswith("_min") else value
    return reduced


def _over_all(parts: Sequence[Named], operation: Any, group: dist.ProcessGroup) -> dict[str, float]:
    """Reduces to one number per name."""
    values: dict[str, list[Tensor]] = defaultdict(list)
    for part in parts:
        for name, value in part.items():
            values[name].append(value.double())
    if not values:
        return {}
    names = sorted(values)
    within = torch.amax if operation == dist.ReduceOp.MAX else torch.sum
    total = torch.stack([within(torch.stack(values[name])) for name in names])
    dist.all_reduce(total, op=operation, group=group)
    return dict(zip(names, total.tolist(), strict=True))
