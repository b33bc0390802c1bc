"""Conventions of other systems that MegaRL does not use: rows padded to one width, and seeds by rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def position_ids(attention_mask: Tensor) -> Tensor:
    """The number of tokens before each one: [1, 0, 0, 1, 1] -> [0, 1, 1, 1, 2].

    Source: lm-human-preferences and TRL. Left padding does not change the position of an unmasked token.

    Args:
        attention_mask: [B, S], 1 or True where a token counts.

    Returns:
        [B, S] int64.
    """
    counts = attention_mask.long()
    return counts.cumsum(-1) - counts


def position_ids_with_padding_at_one(attention_mask: Tensor) -> Tensor:
    """The number of tokens before each one that counts, 1 for padding: [0, 1, 1] -> [1, 0, 1]. Source: OpenRLHF."""
    return position_ids(attention_mask).masked_fill(~attention_mask.bool(), 1)


def left_pad(tokens: Tensor, pad: int) -> Tensor:
    """Moves the padding of each row, wherever it stands, to its left; the tokens keep their order.

    Args:
        tokens: [B, S] int64.
        pad: id of the padding token.
    """
    order = (tokens != pad).long().argsort(dim=-1, stable=True)
    return tokens.gather(-1, order)


def last_column(mask: Tensor) -> Tensor:
    """The last column of each row that has a token. Source: lm-human-preferences, whose responses fill the row."""
    return (torch.arange(mask.shape[1]) == mask.shape[1] - 1) & mask.any(-1, keepdim=True)


def after_last(mask: Tensor) -> Tensor:
    """The column after the last token of each row, or that token in the last column. Source: DeepSpeed-Chat, TRL."""
    last = mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)
    return last.roll(1, -1) & ~last[:, -1:] | last & last_column(mask)


def rank_seeds(seed: int, ranks: Sequence[int], *, stride: int = 100003) -> list[int]:
    """seed + rank * stride for each rank. Source: lm-human-preferences."""
    return [seed + rank * stride for rank in ranks]
