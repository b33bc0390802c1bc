"""Losses and their metrics, one value per token.

A loss becomes a number as ``weighted_sum(loss.values, weights)``, with weights from ``aggregation`` that contain the
denominator of the whole optimizer step: micro-batches and ranks then simply add up. Metrics are per token too; as means
over tokens they are sums over the token-mean weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, kw_only=True)
class TokenLoss:
    """A loss per token.

    Args:
        values: [B, R] (or any shape), differentiable.
        metrics: by name, [B, R] float, detached.
    """

    values: Tensor
    metrics: Mapping[str, Tensor]


def clipped_policy_loss(new_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip: float) -> TokenLoss:
    """PPO: max(-A * r, -A * clamp(r, 1 - clip, 1 + clip)) with r = exp(new - old), the exponent clamped to +-20.

    Source: Schulman et al., "Proximal policy optimization algorithms" (2017).

    Args:
        new_logprobs: [B, R] nats, of the policy in training; carries the gradient.
        old_logprobs: [B, R] nats, of the policy before the update.
        advantages: [B, R].
        clip: half width of the trust region of r.

    Returns:
        Metrics: ``ratio``; ``clip_fraction``, 1 where the clipped branch is the larger; ``approx_kl``, (new - old)^2 /
        2 nats; ``policy_kl``, old - new nats.
    """
    difference = new_logprobs - old_logprobs
    ratio = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip, 1 + clip)
    moved = difference.detach()
    return TokenLoss(
        values=torch.maximum(unclipped, clipped),
        metrics={
            "ratio": ratio.detach(),
            "clip_fraction": (clipped > unclipped).to(ratio.dtype),
            "approx_kl": moved.square() / 2,
            "policy_kl": -moved,
        },
    )


def with_entropy_bonus(loss: TokenLoss, entropy: Tensor, *, coef: float) -> TokenLoss:
    """l - coef * entropy, with ``entropy`` among the metrics.

    Args:
        loss: of the policy. entropy: [B, R] nats, of the distribution that is trained (after the temperature); carries
        a gradient where coef is not 0. coef: loss per nat.
    """
    values = loss.values - coef * entropy if coef else loss.values
    return TokenLoss(values=values, metrics={**loss.metrics, "entropy": entropy.detach()})


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None) -> TokenLoss:
    """max((V - G)^2, (clamp(V, V_old - clip, V_old + clip) - G)^2) / 2; without a clip, (V - G)^2 / 2.

    Source: the PPO of openai/baselines and lm-human-preferences.

    Args:
        values: [B, R], of the critic in training; carries the gradient.
        old_values: [B, R], of the critic before the update.
        returns: [B, R], G.
        clip: how far a value may move from its old one in an update; None: as far as it will.

    Returns:
        Metrics: ``prediction``; ``error``, (V - G)^2; ``clip_fraction``, 1 where the clipped branch is the larger.
    """
    error = (values - returns).square()
    largest = error
    if clip is not None:
        kept_near = torch.clamp(values, old_values - clip, old_values + clip)
        largest = torch.maximum(error, (kept_near - returns).square())
    return TokenLoss(
        values=largest / 2,
        metrics={
            "prediction": values.detach(),
            "error": error.detach(),
            "clip_fraction": (largest > error).to(values.dtype),
        },
    )
