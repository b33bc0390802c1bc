"""Metrics of an iteration's samples, over all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algos.normalisation import Reduce, masked_moments


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
    scores: Tensor, old_logprobs: Tensor, kl: Tensor, penalties: Tensor, response_mask: Tensor, *, reduce: Reduce
) -> dict[str, float]:
    """Means over sequences, in the definitions of lm-human-preferences.

    Args:
        scores: [B].
        old_logprobs: [B, R] nats.
        kl: [B, R] nats, the divergence from the reference.
        penalties: [B, R], the rewards without the score.
        response_mask: [B, R] bool.
        reduce: called once, whether this rank has rows or not.

    Returns:
        ``objective/kl``, nats per sequence, and ``objective/kl_per_token``; ``objective/entropy``, the mean of
        -sum(old) nats; ``objective/score``; ``objective/non_score_reward``; ``objective/rlhf_reward``, the two
        together.
    """
    off = torch.zeros((), dtype=kl.dtype, device=kl.device)
    sums = [
        torch.tensor(float(len(scores)), dtype=torch.float64, device=kl.device),
        response_mask.sum().double(),
        torch.where(response_mask, kl, off).double().sum(),
        torch.where(response_mask, -old_logprobs, off).double().sum(),
        torch.where(response_mask, penalties, off).double().sum(),
        scores.double().sum(),
    ]
    sequences, tokens, kl_sum, entropy, non_score, score = (float(total) for total in reduce(torch.stack(sums)))
    sequences, tokens = max(sequences, 1.0), max(tokens, 1.0)
    return {
        "objective/kl": kl_sum / sequences,
        "objective/kl_per_token": kl_sum / tokens,
        "objective/entropy": entropy / sequences,
        "objective/score": score / sequences,
        "objective/non_score_reward": non_score / sequences,
        "objective/rlhf_reward": (score + non_score) / sequences,
    }


def value_metrics(returns: Tensor, old_values: Tensor, response_mask: Tensor, *, reduce: Reduce) -> dict[str, float]:
    """How well the values foretold the returns, over all counting tokens.

    Args:
        returns: [B, R].
        old_values: [B, R], of the critic before the update.
        response_mask: [B, R] bool.
        reduce: called four times, whether this rank has rows or not.

    Returns:
        ``value/explained_variance``, 1 - var(returns - values) / (var(returns) + 1e-5): 1 is perfect, and 0 no better
        than a constant; ``value/mean``; ``returns/mean`` and ``returns/var``.
    """
    target = masked_moments(returns, response_mask, reduce)
    error = masked_moments(returns - old_values, response_mask, reduce)
    return {
        "value/explained_variance": float(1 - error.sample_variance / (target.sample_variance + 1e-5)),
        "value/mean": float(target.mean - error.mean),
        "returns/mean": float(target.mean),
        "returns/var": float(target.variance),
    }


def group_metrics(scores: Tensor, groups: Tensor) -> dict[str, float]:
    """How much the samples of a prompt differ: where they do not, there is nothing to learn from comparing them.

    Args:
        scores: [B], of all samples of a step.
        groups: [B] int, the number of each sample's prompt, from 0 on.

    Returns:
        ``group/std_mean``, the mean over prompts of the population deviation of their scores;
        ``group/zero_std_fraction``, the share of prompts whose samples all score the same.
    """
    members = [scores[groups == group] for group in range(int(groups.max()) + 1)]
    deviations = torch.stack([own.std(correction=0) for own in members])
    equal = torch.stack([own.min() == own.max() for own in members])
    return {"group/std_mean": float(deviations.mean()), "group/zero_std_fraction": float(equal.float().mean())}
