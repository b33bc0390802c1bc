"""Metrics of a loss: collected per micro-batch, reduced over the micro-batches and replicas of an optimizer step."""

from __future__ import annotations

import math
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
        sums: added up over the step.
        means: weighted sums, which the step divides by the sum of ``weight``.
        squares: likewise, of squares; ``name`` and the mean ``name_mean`` give the step's variance.
        weight: sum of the weights; None without means.
        maxima, minima: infinite where the mask is empty.
        quotients: sums and counts, each added up over the step; a metric without a count is left out.
    """

    sums: Named = field(default_factory=dict[str, Tensor])
    means: Named = field(default_factory=dict[str, Tensor])
    squares: Named = field(default_factory=dict[str, Tensor])
    weight: Tensor | None = None
    maxima: Named = field(default_factory=dict[str, Tensor])
    minima: Named = field(default_factory=dict[str, Tensor])
    quotients: Means = field(default_factory=dict[str, tuple[Tensor, Tensor]])


def collect(terms: LossTerms, mask: Tensor, weights: Tensor) -> LossMetrics:
    """Collects the metrics of a micro-batch's terms, in float64, which keeps the variance of nearly equal numbers.

    Args:
        mask: [B, R] bool, the terms to report.
        weights: [B, R], the same number on all tokens of the step.
    """
    weights = on_mask(weights.double(), mask)

    def mean(values: Tensor) -> Tensor:
        return weighted_sum(values.double(), weights)

    def masked(values: Tensor, bound: float) -> Tensor:
        return torch.cat([values[mask], values.new_full((1,), bound)])

    spreads = terms.spreads.items()
    return LossMetrics(
        means={name: mean(values) for name, values in terms.metrics.items()}
        | {f"{name}_mean": mean(values) for name, values in spreads},
        squares={name: mean(values.double().square()) for name, values in spreads},
        weight=weights.sum(),
        maxima={name: masked(values, -math.inf).max() for name, values in spreads},
        minima={name: masked(values, math.inf).min() for name, values in spreads},
    )


def reduce_metrics(parts: Sequence[LossMetrics], group: dist.ProcessGroup) -> dict[str, float]:
    """Reduces to a step's sums, means, ``{name}_var``, ``{name}_max`` and ``{name}_min``; collective.

    A step with empty masks has neither means nor extremes.

    Args:
        parts: of this rank's micro-batches, in any number; the names are the same on every rank.
    """
    reduced = _over_all([part.sums for part in parts], dist.ReduceOp.SUM, group)
    with_means = [part for part in parts if part.weight is not None]
    weight = _over_all([{"": part.weight} for part in with_means if part.weight is not None], dist.ReduceOp.SUM, group)
    if total_weight := weight.get("", 0.0):
        means = _over_all([part.means for part in with_means], dist.ReduceOp.SUM, group)
        reduced |= {name: total / total_weight for name, total in means.items()}
        squares = _over_all([part.squares for part in with_means], dist.ReduceOp.SUM, group)
        for name, total in squares.items():
            reduced[f"{name}_var"] = max(total / total_weight - reduced[f"{name}_mean"] ** 2, 0.0)
    quotients = [part.quotients for part in parts]
    sums, counts = (
        _over_all([{name: pair[of] for name, pair in own.items()} for own in quotients], dist.ReduceOp.SUM, group)
        for of in (0, 1)
    )
    reduced |= {name: total / counts[name] for name, total in sums.items() if counts[name]}
    maxima = _over_all([part.maxima for part in parts], dist.ReduceOp.MAX, group)
    minima = _over_all([part.minima for part in parts], dist.ReduceOp.MIN, group)
    reduced |= {f"{name}_max": value for name, value in maxima.items() if math.isfinite(value)}
    reduced |= {f"{name}_min": value for name, value in minima.items() if math.isfinite(value)}
    return reduced


_WITHIN: Mapping[dist.ReduceOp.RedOpType, Callable[[Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.sum,
    dist.ReduceOp.MAX: torch.amax,
    dist.ReduceOp.MIN: torch.amin,
}


def _over_all(parts: Sequence[Named], operation: Any, group: dist.ProcessGroup) -> dict[str, float]:
    """Reduces to one number per name, over all micro-batches of all ranks."""
    names = sorted({name for part in parts for name in part})
    if not names:
        return {}
    stacked = [torch.stack([part[name].double() for part in parts if name in part]) for name in names]
    total = torch.stack([_WITHIN[operation](values) for values in stacked])
    dist.all_reduce(total, op=operation, group=group)
    return dict(zip(names, total.tolist(), strict=True))
