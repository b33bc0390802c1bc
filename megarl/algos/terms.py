"""The terms of a loss: one value per token, or per preference pair, with its metrics.

A loss becomes a number as ``weighted_sum(loss.values, weights)``, with weights from ``aggregation`` that contain the
denominator of the whole optimizer step: micro-batches and ranks then simply add up. Metrics are per token (pair) too;
as means they are sums over the token-mean weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LossTerms:
    """The terms of a loss, whose weighted sum it is. What stands off the mask counts nowhere and may be anything.

    Args:
        values: [B, R] by token, or [P] by pair; differentiable.
        metrics: by name, tensors of the same shape, float, detached; the means over what counts in a step are reported.
        spreads: likewise, may be left out; reported as ``{name}_mean``, ``{name}_var``, ``{name}_max``, ``{name}_min``.
    """

    values: Tensor
    metrics: Mapping[str, Tensor]
    spreads: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])


def with_term(loss: LossTerms, name: str, values: Tensor, *, coef: float) -> LossTerms:
    """l + coef * values, with ``values`` among the metrics: a KL penalty, or with coef < 0 an entropy bonus.

    Args:
        loss: of the policy.
        name: of the metric.
        values: as ``loss.values``; carries a gradient where coef is not 0. The KL by an estimator of
            ``megarl.algos.kl``; the entropy of the distribution that is trained (after the temperature), nats.
        coef: loss per unit; with 0 the values are a metric only.
    """
    total = loss.values + coef * values if coef else loss.values
    return replace(loss, values=total, metrics={**loss.metrics, name: values.detach()})


def weighted(loss: LossTerms, weights: Tensor) -> LossTerms:
    """w * l, of the finished terms, after any clipping; the metrics stay those of all tokens.

    Args:
        loss: of the policy.
        weights: as ``loss.values``, without a gradient: rollout corrections and keep masks. Where a weight is 0 the
            term and its gradient are exactly 0, whatever the term is.
    """
    kept = torch.where(weights != 0, loss.values, torch.zeros_like(loss.values))
    return replace(loss, values=kept * weights)
