"""Where responses end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Ends:
    """Where responses end.

    Args:
        kept: [B, R] bool, the tokens up to the end, its own token included; all of them where there is no end.
        lengths: [B] int64, how many these are.
        found: [B] bool, whether there is an end.
    """

    kept: Tensor
    lengths: Tensor
    found: Tensor


def first_end(response_ids: Tensor, response_mask: Tensor, tokens: Sequence[int], *, after: int = 0) -> Ends:
    """The first of some tokens in each response, at an index of at least ``after``, ends it.

    Counting by the tokens themselves, not by what is not padding, keeps the end where it is the padding token as well.
    Source: lm-human-preferences, whose reward model sees a response up to its first full stop or line break after a
    minimum of tokens; verl, get_response_mask, for several end tokens.

    Args:
        response_ids: [B, R] int64.
        response_mask: [B, R] bool, the tokens that a response has.
        tokens: ids of the end tokens.
        after: index of the first token that may end a response.
    """
    columns = torch.arange(response_ids.shape[1], device=response_ids.device)
    ends = torch.isin(response_ids, torch.tensor(tokens, device=response_ids.device)) & response_mask
    ends = ends & (columns >= after)
    ended_before = ends.cumsum(-1) - ends.long() > 0
    kept = response_mask & ~ended_before
    return Ends(kept=kept, lengths=kept.sum(-1), found=ends.any(-1))
