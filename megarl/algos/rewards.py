"""From one score per response to one reward per token."""

from __future__ import annotations

import torch
from torch import Tensor


def clip_scores(scores: Tensor, limit: float) -> Tensor:
    """Scores within [-limit, limit]."""
    return scores.clamp(-limit, limit)


def replace_missing_end(scores: Tensor, finished: Tensor, score: float) -> Tensor:
    """Gives responses that the length limit ended a fixed score, whatever they earned.

    Source: lm-human-preferences, where a sample without the stop token scores -1. The fixed score is not clipped: apply
    it after ``clip_scores``.

    Args:
        scores: [B].
        finished: [B] bool, True where the model ended the response itself.
        score: what the others get.
    """
    return torch.where(finished, scores, torch.full_like(scores, score))


def token_rewards(scores: Tensor, kl: Tensor, response_mask: Tensor, *, kl_coef: float) -> Tensor:
    """r[t] = -kl_coef * kl[t], plus the score at the row's last counting token; 0 off the mask.

    Source: PPO for language models (lm-human-preferences; Ouyang et al. 2022). A row without a counting token has no
    reward. A negative coefficient counts as 0.

    Args:
        scores: [B], one per response.
        kl: [B, R] nats, an estimate per token.
        response_mask: [B, R] bool.
        kl_coef: reward per nat.

    Returns:
        [B, R].
    """
    penalties = torch.where(response_mask, -max(kl_coef, 0.0) * kl, torch.zeros_like(kl))
    tokens_left = response_mask.flip(-1).cumsum(-1).flip(-1)
    is_last = response_mask & (tokens_left == 1)
    return penalties + torch.where(is_last, scores[:, None], torch.zeros_like(kl))
