"""Metrics of an iteration's samples, as means over all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algos.normalisation import Reduce


def rollout_gap(old_logprobs: Tensor, rollout_logprobs: Tensor, response_mask: Tensor, *, reduce: Reduce) -> float:
    """Mean |old - rollout| in nats per token: how far trainer and engine disagree about the same tokens.

    With the same weights, and without top-p and top-k, which the engine's numbers contain, only rounding is left.

    Args:
        old_logprobs: [B, R], by the trainer.
        rollout_logprobs: [B, R], by the engine that sampled.
        response_mask: [B, R] bool.
        reduce: called once, whether this rank has rows or not.
    """
    gaps = (old_logprobs - rollout_logprobs).abs()[response_mask].double()
    tokens, total = reduce(torch.stack([gaps.new_tensor(gaps.numel()), gaps.sum()])).unbind()
    return float(total) / max(float(tokens), 1.0)


def objective_metrics(
    scores: Tensor, old_logprobs: Tensor, kl: Tensor, response_mask: Tensor, *, kl_coef: float, reduce: Reduce
) -> dict[str, float]:
    """Means over sequences, in the names and definitions of lm-human-preferences.

    Args:
        scores: [B].
        old_logprobs: [B, R] nats.
        kl: [B, R] nats, the estimate that the rewards use.
        response_mask: [B, R] bool.
        kl_coef: reward per nat.
        reduce: called once, whether this rank has rows or not.

    Returns:
        ``objective/kl``, nats per sequence, and ``objective/kl_per_token``; ``objective/entropy``, the mean of
        -sum(old) nats; ``objective/score``; ``objective/non_score_reward``; ``objective/score_total``, the two
        together.
    """
    off = torch.zeros((), dtype=kl.dtype, device=kl.device)
    sums = [
        torch.tensor(float(len(scores)), dtype=torch.float64, device=kl.device),
        response_mask.sum().double(),
        torch.where(response_mask, kl, off).double().sum(),
        torch.where(response_mask, -old_logprobs, off).double().sum(),
        scores.double().sum(),
    ]
    sequences, tokens, kl_sum, entropy, score = (float(total) for total in reduce(torch.stack(sums)))
    sequences, tokens = max(sequences, 1.0), max(tokens, 1.0)
    non_score = -kl_coef * kl_sum / sequences
    return {
        "objective/kl": kl_sum / sequences,
        "objective/kl_per_token": kl_sum / tokens,
        "objective/entropy": entropy / sequences,
        "objective/score": score / sequences,
        "objective/non_score_reward": non_score,
        "objective/score_total": score / sequences + non_score,
    }
