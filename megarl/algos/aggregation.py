"""Weights of token losses: loss = sum over all tokens of weight * value.

The weights contain the denominator of the whole optimizer step, over its micro-batches and ranks,
so that the loss does not depend on how the step is split. Tokens that a correction drops stay in
the denominator. An aggregation is a function of (response_mask), with total_tokens, total_sequences
and options by keyword:

    response_mask: [B, R] bool, of some rows of the step.
    total_tokens: counting tokens of the step, over all micro-batches and ranks.
    total_sequences: rows of the step with a counting token, over all micro-batches and ranks.

It returns [B, R], 0 off the mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.bounds import Count


def token_mean(
    response_mask: Tensor, *, total_tokens: int, total_sequences: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The mean over the tokens of the optimizer step.

    Every counting token weighs 1 / total_tokens. Source: OpenRLHF, verl and DAPO (Yu et al., 2025).
    """
    return response_mask.to(dtype) / max(total_tokens, 1)


def token_sum(
    response_mask: Tensor, *, total_tokens: int, total_sequences: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The sum over the tokens of the optimizer step.

    Every counting token weighs 1: the gradient grows with the tokens of a step. Source: verl.
    """
    return response_mask.to(dtype)


def sequence_mean(
    response_mask: Tensor, *, total_tokens: int, total_sequences: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The mean over sequences of the means over their tokens.

    A token of a row with n counting tokens weighs 1 / (n * total_sequences); rows
    without one are left out.
    Source: GRPO (Shao et al., 2024) and GSPO (Zheng et al., 2025).
    """
    lengths = response_mask.sum(-1, keepdim=True).clamp(min=1)
    return response_mask.to(dtype) / (lengths * max(total_sequences, 1))


def sequence_sum(
    response_mask: Tensor, *, total_tokens: int, total_sequences: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The mean over sequences of the sums over their tokens.

    Every counting token weighs 1 / total_sequences. Source: verl's seq-mean-token-sum.
    """
    return response_mask.to(dtype) / max(total_sequences, 1)


def sequence_sum_norm(
    response_mask: Tensor, *, total_tokens: int, total_sequences: int, dtype: torch.dtype = torch.float32, tokens: Count
) -> Tensor:
    """The mean over sequences of the sums over their tokens, divided by a constant length.

    Every counting token weighs 1 / (total_sequences * tokens). Source: Dr. GRPO, Liu et al.,
    "Understanding R1-Zero-like training" (2025), with the longest response as the constant.

    Args:
        tokens: the constant length, such as that of the longest response.
    """
    return response_mask.to(dtype) / (max(total_sequences, 1) * tokens)


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """sum(weights * values), where values of weight 0 may be anything, even NaN."""
    return (torch.where(weights != 0, values, torch.zeros_like(values)) * weights).sum()
