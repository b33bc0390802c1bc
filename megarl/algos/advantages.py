"""Advantages: per response token, or per sample from a comparison of the samples of a prompt."""

from __future__ import annotations

import torch
from torch import Tensor

EPS = 1e-6


def gae(rewards: Tensor, values: Tensor, response_mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the counting tokens of each row.

    delta[t] = r[t] + gamma * V[t'] - V[t];  A[t] = delta[t] + gamma * lam * A[t'];  returns[t] = A[t] + V[t], where t'
    is the next counting token of the row and V, A are 0 after the last. Tokens that do not count (of a tool, say) are
    passed over: neither a reward nor a discount step. Source: Schulman et al., "High-dimensional continuous control
    using generalized advantage estimation" (2016).

    Args:
        rewards: [B, R].
        values: [B, R], of the state before each token.
        response_mask: [B, R] bool.
        gamma: discount per token.
        lam: decay of the estimator.

    Returns:
        advantages and returns, [B, R], 0 off the mask.
    """
    advantages = torch.zeros_like(values)
    next_advantage = next_value = values.new_zeros(len(values))
    for t in reversed(range(values.shape[1])):
        counts = response_mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(counts, delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(counts, values[:, t], next_value)
        advantages[:, t] = torch.where(counts, next_advantage, advantages[:, t])
    returns = torch.where(response_mask, advantages + values, torch.zeros_like(values))
    return advantages, returns


def grpo(scores: Tensor, groups: Tensor) -> Tensor:
    """(score - mean) / (deviation + 1e-6) within each group, the deviation with Bessel's correction.

    A group of one sample, or of equal scores, says nothing about its samples: their advantage is exactly 0. Source:
    Shao et al., "DeepSeekMath: pushing the limits of mathematical reasoning in open language models" (2024).

    Args:
        scores: [B], of all samples of a step: the samples of a group need not be neighbours.
        groups: [B] int64, the number of each sample's prompt, from 0 on.

    Returns:
        [B].
    """

    def over_group(values: Tensor, reduction: str) -> Tensor:
        zeros = values.new_zeros(int(groups.max()) + 1)
        return zeros.scatter_reduce(0, groups, values, reduction, include_self=False)[groups]

    count = over_group(torch.ones_like(scores), "sum")
    centred = scores - over_group(scores, "sum") / count
    deviation = (over_group(centred.square(), "sum") / (count - 1).clamp(min=1)).sqrt()
    differ = over_group(scores, "amax") > over_group(scores, "amin")
    return torch.where(differ, centred / (deviation + EPS), torch.zeros_like(scores))


def per_token(outcomes: Tensor, response_mask: Tensor) -> Tensor:
    """[B, R]: the advantage of a sample, [B], on each of its counting tokens; 0 off the mask."""
    return torch.where(response_mask, outcomes[:, None], torch.zeros_like(outcomes)[:, None])
