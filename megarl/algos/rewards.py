"""Rewards of response tokens: the penalty of each, and the score on one of them, or a score on each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

import torch
from torch import Tensor

from megarl.algos.normalisation import on_mask

Placement = Literal["last_valid", "last_column", "after_last", "every_valid"]
"""Where the score of a response stands; see token_rewards."""


def kl_penalties(kl: Tensor, response_mask: Tensor, *, kl_coef: float) -> Tensor:
    """-kl_coef * kl[t], the part of a token's reward that is not the score; 0 off the mask.

    Source: lm-human-preferences; Stiennon et al., "Learning to summarize from human feedback" (2020).

    Args:
        kl: [B, R] nats, an estimate per token.
        response_mask: [B, R] bool.
        kl_coef: reward per nat; a negative one counts as 0.

    Returns:
        [B, R].
    """
    return on_mask(-max(kl_coef, 0.0) * kl, response_mask)


def token_rewards(
    scores: Tensor, penalties: Tensor, response_mask: Tensor, *, placement: Placement = "last_valid"
) -> Tensor:
    """The penalties, plus the score at one token of the row.

    ``placement``: last_valid, the row's last counting token; every_valid, each counting token, which multiplies the
    score by the length. A row without a counting token has no reward. Source: InstructGPT (Ouyang et al., 2022),
    OpenRLHF, verl (last_valid); ColossalChat (every_valid).

    Args:
        scores: [B], one per response.
        penalties: [B, R], of ``kl_penalties``.
        response_mask: [B, R] bool.
        placement: of the score. Two more are of padded rows, which a run has none of: last_column, the last column
            (lm-human-preferences, whose responses fill the row), and after_last, the column after the last counting
            token, or that token where there is none (DeepSpeed-Chat, TRL).

    Returns:
        [B, R]; 0 off the mask, but for a score that is placed there.
    """
    here = _PLACES[placement](response_mask) & response_mask.any(-1, keepdim=True)
    return penalties + torch.where(here, scores[:, None], torch.zeros_like(penalties))


def dense_rewards(
    dense: Tensor,
    penalties: Tensor,
    response_mask: Tensor,
    *,
    differences: bool = False,
    clip: tuple[float, float] | None = None,
) -> Tensor:
    """The penalties, plus the score of the response so far: s[t + 1], or what the token added, s[t + 1] - s[t].

    Source: AReaL (legacy), dense rewards and reward_delta.

    Args:
        dense: [B, R + 1], the score before the first response token and after each one.
        penalties: [B, R], of ``kl_penalties``.
        response_mask: [B, R] bool.
        differences: whether a token earns what it added.
        clip: bounds of the scores, which are clamped first; None: they are not.

    Returns:
        [B, R], 0 off the mask.
    """
    limited = dense if clip is None else dense.clamp(*clip)
    earned = limited[:, 1:] - limited[:, :-1] if differences else limited[:, 1:]
    return on_mask(penalties + earned, response_mask)


def _last_valid(mask: Tensor) -> Tensor:
    tokens_left = mask.flip(-1).cumsum(-1).flip(-1)
    return mask & (tokens_left == 1)


def _last_column(mask: Tensor) -> Tensor:
    return torch.arange(mask.shape[1], device=mask.device).expand_as(mask) == mask.shape[1] - 1


def _after_last(mask: Tensor) -> Tensor:
    last = _last_valid(mask)
    return last.roll(1, -1) & ~last[:, -1:] | last & _last_column(mask)


_PLACES: Final[dict[Placement, Callable[[Tensor], Tensor]]] = {
    "last_valid": _last_valid,
    "last_column": _last_column,
    "after_last": _after_last,
    "every_valid": lambda mask: mask,
}
