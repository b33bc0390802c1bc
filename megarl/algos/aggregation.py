"""Token weights that turn values per token into a number: loss = sum over all tokens of weight * value.

The weights contain the denominator of a whole optimizer step, over its micro-batches and ranks, so that the sum does
not depend on how the step is split. An aggregation is a function of (response_mask, total_tokens, total_sequences,
dtype) like those below.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_mean(
    response_mask: Tensor, *, total_tokens: int, total_sequences: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Every counting token weighs 1 / total_tokens: the mean over the tokens of the optimizer step.

    Args:
        response_mask: [B, R] bool, of some rows of the step.
        total_tokens: counting tokens of the step, over all micro-batches and ranks.
        total_sequences: rows of the step, over all micro-batches and ranks; not used. See sequence_mean.
        dtype: of the weights.

    Returns:
        [B, R], 0 off the mask.
    """
    del total_sequences
    return response_mask.to(dtype) / max(total_tokens, 1)


def sequence_mean(
    response_mask: Tensor, *, total_tokens: int, total_sequences: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """A token of a row with n counting tokens weighs 1 / (n * total_sequences): the mean over rows of their means.

    A row without a counting token adds 0 to the sum. Callers pass the number of all rows of the step (a schedule's
    ``total_rows``), so that such a row is averaged over as one of mean 0; with the number of rows that have a counting
    token it would be left out.

    Args: as for token_mean; here it is ``total_tokens`` that is not used.
    """
    del total_tokens
    lengths = response_mask.sum(-1, keepdim=True).clamp(min=1)
    return response_mask.to(dtype) / (lengths * max(total_sequences, 1))


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """sum(weights * values), where entries of weight 0 may hold anything, even what is not a number."""
    return (torch.where(weights != 0, values, torch.zeros_like(values)) * weights).sum()
