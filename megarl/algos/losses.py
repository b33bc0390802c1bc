"""Losses and their metrics, one value per token, or per preference pair.

A loss becomes a number as ``weighted_sum(loss.values, weights)``, with weights from ``aggregation`` that contain the
denominator of the whole optimizer step: micro-batches and ranks then simply add up. Metrics are per token too; as means
over tokens they are sums over the token-mean weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, kw_only=True)
class LossTerms:
    """The terms of a loss, whose weighted sum it is.

    Args:
        values: [B, R] by token, or [P] by pair; differentiable.
        metrics: by name, of the same shape, float, detached.
    """

    values: Tensor
    metrics: Mapping[str, Tensor]


def clipped_policy_loss(new_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip: float) -> LossTerms:
    """PPO: max(-A * r, -A * clamp(r, 1 - clip, 1 + clip)) with r = exp(new - old), the exponent clamped to +-20.

    Source: Schulman et al., "Proximal policy optimization algorithms" (2017).

    Args:
        new_logprobs: [B, R] nats, of the policy in training; carries the gradient.
        old_logprobs: [B, R] nats, of the policy before the update.
        advantages: [B, R].
        clip: half width of the trust region of r.

    Returns:
        Metrics: ``ratio``; ``clipfrac``, 1 where the clipped branch is the larger; ``approxkl``, (new - old)^2 / 2
        nats; ``ppo_kl``, old - new nats.
    """
    difference = new_logprobs - old_logprobs
    ratio = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip, 1 + clip)
    moved = difference.detach()
    return LossTerms(
        values=torch.maximum(unclipped, clipped),
        metrics={
            "ratio": ratio.detach(),
            "clipfrac": (clipped > unclipped).to(ratio.dtype),
            "approxkl": moved.square() / 2,
            "ppo_kl": -moved,
        },
    )


def with_entropy_bonus(loss: LossTerms, entropy: Tensor, *, coef: float) -> LossTerms:
    """l - coef * entropy, with ``entropy`` among the metrics.

    Args:
        loss: of the policy. entropy: [B, R] nats, of the distribution that is trained (after the temperature); carries
        a gradient where coef is not 0. coef: loss per nat.
    """
    values = loss.values - coef * entropy if coef else loss.values
    return LossTerms(values=values, metrics={**loss.metrics, "entropy": entropy.detach()})


def with_kl_penalty(loss: LossTerms, kl: Tensor, *, coef: float) -> LossTerms:
    """l + coef * kl, with ``kl`` among the metrics.

    Args:
        loss: of the policy.
        kl: [B, R] nats, an estimate per token by one of ``megarl.algos.kl``; carries a gradient.
        coef: loss per nat.
    """
    return LossTerms(values=loss.values + coef * kl, metrics={**loss.metrics, "kl": kl.detach()})


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None) -> LossTerms:
    """max((V - G)^2, (clamp(V, V_old - clip, V_old + clip) - G)^2) / 2; without a clip, (V - G)^2 / 2.

    Source: the PPO of openai/baselines and lm-human-preferences.

    Args:
        values: [B, R], of the critic in training; carries the gradient.
        old_values: [B, R], of the critic before the update.
        returns: [B, R], G.
        clip: how far a value may move from its old one in an update; None: as far as it will.

    Returns:
        Metrics: ``vpred``, V; ``error``, (V - G)^2; ``clipfrac``, 1 where the clipped branch is the larger.
    """
    error = (values - returns).square()
    largest = error
    if clip is not None:
        kept_near = torch.clamp(values, old_values - clip, old_values + clip)
        largest = torch.maximum(error, (kept_near - returns).square())
    return LossTerms(
        values=largest / 2,
        metrics={
            "vpred": values.detach(),
            "error": error.detach(),
            "clipfrac": (largest > error).to(values.dtype),
        },
    )


def bradley_terry_loss(chosen: Tensor, rejected: Tensor, *, centering: float = 0.0) -> LossTerms:
    """-log sigmoid(chosen - rejected) + centering * (chosen + rejected)^2.

    The first term is the negative log-likelihood of the preference under the model of Bradley and Terry (1952); the
    second, which keeps the scores around 0, is that of Eisenstein et al., "Helping or herding?" (2023).

    Args:
        chosen: [P], scores of the responses that were preferred; carries the gradient.
        rejected: [P], scores of the others.
        centering: weight of the second term.

    Returns:
        Metrics: ``accuracy``, 1 where the chosen response scores more; ``margin``, chosen - rejected; ``chosen`` and
        ``rejected``, the scores.
    """
    margin = chosen - rejected
    values = -functional.logsigmoid(margin)
    if centering:
        values = values + centering * (chosen + rejected).square()
    return LossTerms(
        values=values,
        metrics={
            "accuracy": (margin > 0).to(margin.dtype),
            "margin": margin.detach(),
            "chosen": chosen.detach(),
            "rejected": rejected.detach(),
        },
    )
