"""Rows of one width with padding, for libraries that want them; packs need none of it."""

from __future__ import annotations

from torch import Tensor


def position_ids(attention_mask: Tensor) -> Tensor:
    """The number of tokens before each one: [1, 0, 0, 1, 1] -> [0, 1, 1, 1, 2].

    Source: lm-human-preferences and TRL. Where a token counts, any left padding leaves it the position that it has
    without padding.

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
