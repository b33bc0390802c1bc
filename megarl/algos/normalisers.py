"""Normalisation of the token rewards and the advantages of a step.

A normaliser of advantages is a function of (advantages, response_mask, groups, reduce), with options by keyword:

Args:
    advantages: [B, R], this rank's rows.
    response_mask: [B, R] bool; in a run False on responses without a score.
    groups: normalisation.Groups, the prompt of each row, numbered over the whole step.
    reduce: normalisation.Reduce, called equally often by every rank, whether it has rows or not.

Returns:
    [B, R], 0 off the mask.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megarl.algos.normalisation import Form, Groups, Reduce, grouped_moments, on_mask, standardise

Level = Literal["batch", "group"]


def whiten_rewards(rewards: Tensor, response_mask: Tensor, reduce: Reduce) -> Tensor:
    """(r - mean) / sqrt(variance + 1e-8) + mean, over the tokens of the step: a variance of 1, without a shift.

    Source: lm-human-preferences, there per rank and mini-batch.

    Args:
        rewards: [B, R], this rank's rows; the penalties and the score together.
        response_mask: [B, R] bool.
        reduce: called twice, whether this rank has tokens or not.

    Returns:
        [B, R], 0 off the mask.
    """
    return on_mask(standardise(rewards, response_mask, reduce, keep_mean=True), response_mask)


def whiten_advantages(
    advantages: Tensor,
    response_mask: Tensor,
    groups: Groups,
    reduce: Reduce,
    *,
    ddof: Literal[0, 1] = 0,
    form: Form = "var_plus_eps",
    mean_only: bool = False,
    eps: float = 1e-8,
) -> Tensor:
    """(A - mean) / sqrt(variance + eps), over the response tokens of the step.

    ``ddof`` 1 is the sample variance. ``form`` var_clamp divides by sqrt(max(variance, eps)), std_plus_eps by
    sqrt(variance) + eps; with ``mean_only`` nothing is divided. Source: lm-human-preferences and NeMo-Aligner (as
    here); verl and TRL (ddof 1); OpenRLHF (var_clamp, and mean_only); AReaL (std_plus_eps, eps 1e-5).
    """
    del groups
    whitened = standardise(advantages, response_mask, reduce, ddof=ddof, form=form, mean_only=mean_only, eps=eps)
    return on_mask(whitened, response_mask)


def grouped_tokens(
    advantages: Tensor,
    response_mask: Tensor,
    groups: Groups,
    reduce: Reduce,
    *,
    ddof: Literal[0, 1] = 0,
    eps: float = 1e-5,
) -> Tensor:
    """(A - mean) / (deviation + eps), over the response tokens of each prompt's samples: long responses weigh more.

    Source: AReaL, grouped advantage normalisation.
    """
    moments = grouped_moments(advantages, response_mask, groups, reduce)
    mean, deviation = (of_group[groups.index, None] for of_group in (moments.mean, moments.variance_of(ddof).sqrt()))
    return on_mask(((advantages.double() - mean) / (deviation + eps)).to(advantages.dtype), response_mask)


def levels(
    advantages: Tensor,
    response_mask: Tensor,
    groups: Groups,
    reduce: Reduce,
    *,
    mean: Level | None = "batch",
    std: Level | None = "batch",
    leave_one_out: bool = False,
    unbiased: bool = True,
    eps: float = 1e-5,
) -> Tensor:
    """(A - mean) / (deviation + eps), each over the step (batch), over each prompt's samples (group), or not (None).

    c = A - mean, with ``leave_one_out`` the mean of the other tokens; the deviation is sqrt(sum(c^2) / (n - 1)), with
    n in place of n - 1 unless ``unbiased``: around what was subtracted, be it another level's mean. A token alone has
    no others, whose mean is then 0, and no unbiased deviation, which is then 1. Without a level for the mean c is A,
    and without one for the deviation c is the result. Source: AReaL, NormConfig; its presets are batch and batch (PPO),
    group and batch (LitePPO), group and none (Dr. GRPO; with leave_one_out RLOO).
    """
    together = Groups(index=torch.zeros_like(groups.index), count=1)
    of_level = {"batch": together, "group": groups}
    centred = on_mask(advantages.double(), response_mask)
    if mean is not None:
        centred = centred - _means(centred, response_mask, of_level[mean], reduce, leave_one_out=leave_one_out)
        centred = on_mask(centred, response_mask)
    if std is not None:
        moments = grouped_moments(centred.square(), response_mask, of_level[std], reduce)
        total = moments.mean * moments.count
        deviation = (total / (moments.count - int(unbiased)).clamp(min=1)).sqrt()
        if unbiased:
            deviation = torch.where(moments.count > 1, deviation, torch.ones_like(deviation))
        centred = centred / (deviation[of_level[std].index, None] + eps)
    return centred.to(advantages.dtype)


def _means(values: Tensor, mask: Tensor, groups: Groups, reduce: Reduce, *, leave_one_out: bool) -> Tensor:
    """Of each entry's group: [B, 1], or without the entry itself, [B, R]; 0 where there are no others."""
    moments = grouped_moments(values, mask, groups, reduce)
    mean, count = moments.mean[groups.index, None], moments.count[groups.index, None]
    if not leave_one_out:
        return mean
    return torch.where(count > 1, (mean * count - values) / (count - 1).clamp(min=1), torch.zeros_like(values))
