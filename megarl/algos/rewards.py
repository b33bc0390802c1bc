"""Scores of responses: their scale and shape, and the rewards per token that they make."""

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


def shape_scores(scores: Tensor, finished: Tensor, *, clip: float | None, missing_end: float | None) -> Tensor:
    """Both of the above, in their order; None leaves one out.

    Args:
        scores: [B].
        finished: [B] bool.
        clip: limit of the scores.
        missing_end: score of responses that the length limit ended.
    """
    shaped = scores if clip is None else clip_scores(scores, clip)
    return shaped if missing_end is None else replace_missing_end(shaped, finished, missing_end)


def score_scale(scores: Tensor) -> tuple[float, float]:
    """Mean and population deviation of a reward model's scores of reference samples; see normalise_scores.

    Raises:
        ValueError: all scores are equal.
    """
    values = scores.double()
    if len(values) == 0 or values.min() == values.max():
        raise ValueError(
            f"{len(values)} reference samples without two different scores: their scale says nothing;"
            " take other samples, or look whether the reward model has learnt anything"
        )
    return float(values.mean()), float(values.std(correction=0))


def normalise_scores(scores: Tensor, *, mean: float, deviation: float) -> Tensor:
    """(score - mean) / deviation: mean 0 and variance 1 on the reference samples of ``score_scale``."""
    return (scores - mean) / deviation


def kl_penalties(kl: Tensor, response_mask: Tensor, *, kl_coef: float) -> Tensor:
    """-kl_coef * kl[t], the part of a token's reward that is not the score; 0 off the mask.

    Args:
        kl: [B, R] nats, an estimate per token.
        response_mask: [B, R] bool.
        kl_coef: reward per nat; a negative one counts as 0.

    Returns:
        [B, R].
    """
    return torch.where(response_mask, -max(kl_coef, 0.0) * kl, torch.zeros_like(kl))


def token_rewards(scores: Tensor, penalties: Tensor, response_mask: Tensor) -> Tensor:
    """The penalties, plus the score at the row's last counting token; 0 off the mask.

    Source: PPO for language models (lm-human-preferences; Ouyang et al. 2022). A row without a counting token has no
    reward.

    Args:
        scores: [B], one per response.
        penalties: [B, R], of ``kl_penalties``.
        response_mask: [B, R] bool.

    Returns:
        [B, R].
    """
    tokens_left = response_mask.flip(-1).cumsum(-1).flip(-1)
    is_last = response_mask & (tokens_left == 1)
    return penalties + torch.where(is_last, scores[:, None], torch.zeros_like(penalties))
