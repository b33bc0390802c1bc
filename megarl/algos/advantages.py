"""Advantages per response token."""

from __future__ import annotations

import torch
from torch import Tensor


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
