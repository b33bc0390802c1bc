"""Moments over all ranks, whitening with them, and the normalization of token rewards and advantages.

Statistics are taken in float64 and in two passes: the mean, then the squares around it. Every rank calls a reduction
the same number of times, whether it has rows or not: one that left it out would stop the others.

A normaliser of advantages is a function of (advantages, response_mask, groups, reduce), with options by keyword:

Args:
    advantages: [B, R], this rank's rows.
    response_mask: [B, R] bool; in a run False on responses without a score.
    groups: normalization.Groups, the prompt of each row, numbered over the whole step.
    reduce: normalization.Reduce, called equally often by every rank, whether it has rows or not.
    ddof: the variance's degrees of freedom that are taken off the number of tokens.
    eps: added to the deviation.

Returns:
    [B, R], 0 off the mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from megarl.bounds import Positive

Reduce = Callable[[Tensor], Tensor]
"""Sums a small float64 vector over the ranks that share a batch; collective: every rank calls, with data or without."""

Form = Literal["var_plus_eps", "var_clamp", "std_plus_eps"]
"""The divisor: sqrt(variance + eps), sqrt(max(variance, eps)), or sqrt(variance) + eps."""

Level = Literal["batch", "group"]
DDof = Literal[0, 1]

_DIVISORS: Final[dict[Form, Callable[[Tensor, float], Tensor]]] = {
    "var_plus_eps": lambda variance, eps: (variance + eps).sqrt(),
    "var_clamp": lambda variance, eps: variance.clamp(min=eps).sqrt(),
    "std_plus_eps": lambda variance, eps: variance.sqrt() + eps,
}


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Which rows belong together, over all ranks.

    Args:
        index: [B] int64, the group of each of this rank's rows, from 0 on.
        count: of groups, on all ranks together.
    """

    index: Tensor
    count: int


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Of all counting entries on all ranks: their number, mean and population variance.

    Float64: scalars, or [G], by group.
    """

    count: Tensor
    mean: Tensor
    variance: Tensor

    @property
    def sample_variance(self) -> Tensor:
        """The variance with Bessel's correction; that of one entry is 0."""
        return self.variance * self.count / (self.count - 1).clamp(min=1)

    def variance_of(self, ddof: int) -> Tensor:
        """The variance with 0 or 1 degrees of freedom taken off the number of entries."""
        return self.sample_variance if ddof else self.variance


def masked_moments(values: Tensor, mask: Tensor, reduce: Reduce) -> Moments:
    """Over all entries that count; all 0 where nothing counts anywhere.

    Args:
        values: this rank's entries, any shape; ``mask`` likewise.
        reduce: called twice.
    """
    together = Groups(index=torch.zeros(mask.shape[:1], dtype=torch.int64, device=mask.device), count=1)
    moments = grouped_moments(values, mask, together, reduce)
    return Moments(count=moments.count[0], mean=moments.mean[0], variance=moments.variance[0])


def grouped_moments(values: Tensor, mask: Tensor, groups: Groups, reduce: Reduce) -> Moments:
    """Over the entries that count of each group's rows; all 0 in a group in which nothing counts.

    Args:
        values: [B, ...], this rank's rows; ``mask`` likewise.
        reduce: called twice.
    """
    counted = values[mask].double()
    owner = groups.index.reshape(-1, *[1] * (mask.ndim - 1)).expand_as(mask)[mask]

    def over_ranks(*entries: Tensor) -> Tensor:
        sums = [entry.new_zeros(groups.count).index_add(0, owner, entry) for entry in entries]
        return reduce(torch.cat(sums)).reshape(len(sums), groups.count)

    count, total = over_ranks(torch.ones_like(counted), counted)
    mean = total / count.clamp(min=1)
    (squares,) = over_ranks((counted - mean[owner]).square())
    return Moments(count=count, mean=mean, variance=squares / count.clamp(min=1))


def standardise(
    values: Tensor,
    mask: Tensor,
    reduce: Reduce,
    *,
    keep_mean: bool = False,
    ddof: int = 0,
    form: Form = "var_plus_eps",
    mean_only: bool = False,
    eps: float = 1e-8,
) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8), with the moments of the counting entries on all ranks.

    Entries off the mask go through the same map: callers set them to what they want.

    Args:
        values: [B, R], this rank's rows; the result has their dtype.
        reduce: called twice, whether this rank has tokens or not.
        keep_mean: add the mean again.
        mean_only: do not divide.
    """
    moments = masked_moments(values, mask, reduce)
    divisor = torch.ones_like(moments.mean) if mean_only else _DIVISORS[form](moments.variance_of(ddof), eps)
    whitened = (values.double() - moments.mean) / divisor
    return (whitened + moments.mean if keep_mean else whitened).to(values.dtype)


def on_mask(values: Tensor, mask: Tensor) -> Tensor:
    """The values, and 0 off the mask, where they may be anything."""
    return torch.where(mask, values, torch.zeros_like(values))


def whiten_rewards(rewards: Tensor, response_mask: Tensor, reduce: Reduce) -> Tensor:
    """(r - mean) / sqrt(variance + 1e-8) + mean, over the tokens of the step: a variance of 1, without a shift.

    Source: lm-human-preferences, there per rank and mini-batch.

    Args:
        rewards: [B, R], this rank's rows; the penalties and the score together.
        reduce: called twice, whether this rank has tokens or not.
    """
    return on_mask(standardise(rewards, response_mask, reduce, keep_mean=True), response_mask)


def whiten_advantages(
    advantages: Tensor,
    response_mask: Tensor,
    groups: Groups,
    reduce: Reduce,
    *,
    ddof: DDof = 0,
    form: Form = "var_plus_eps",
    mean_only: bool = False,
    eps: Positive = 1e-8,
) -> Tensor:
    """(A - mean) / sqrt(variance + eps), over the response tokens of the step.

    ``ddof`` 1 is the sample variance. ``form`` var_clamp divides by sqrt(max(variance, eps)), std_plus_eps by
    sqrt(variance) + eps; with ``mean_only`` nothing is divided. Source: lm-human-preferences and NeMo-Aligner (as
    here); verl and TRL (ddof 1); OpenRLHF (var_clamp, and mean_only); AReaL (std_plus_eps, eps 1e-5).

    Args:
        form: the divisor: sqrt(variance + eps), sqrt(max(variance, eps)), or the deviation + eps.
        mean_only: shift alone.
        eps: keeps the divisor off 0.
    """
    del groups
    whitened = standardise(advantages, response_mask, reduce, ddof=ddof, form=form, mean_only=mean_only, eps=eps)
    return on_mask(whitened, response_mask)


def grouped_tokens(
    advantages: Tensor, response_mask: Tensor, groups: Groups, reduce: Reduce, *, ddof: DDof = 0, eps: Positive = 1e-5
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
    eps: Positive = 1e-5,
) -> Tensor:
    """(A - mean) / (deviation + eps), each over the step (batch), over each prompt's samples (group), or not (None).

    c = A - mean, with ``leave_one_out`` the mean of the other tokens; the deviation is sqrt(sum(c^2) / (n - 1)), with
    n in place of n - 1 unless ``unbiased``: around what was subtracted, be it another level's mean. A token alone has
    no others, whose mean is then 0, and no unbiased deviation, which is then 1. Without a level for the mean c is A,
    and without one for the deviation c is the result. Source: AReaL, NormConfig; its presets are batch and batch (PPO),
    group and batch (LitePPO), group and none (Dr. GRPO; with leave_one_out RLOO).

    Args:
        mean: what the mean is taken over; None does not shift.
        std: what the deviation is taken over; None does not scale.
        leave_one_out: leave a token out of the mean that it is compared with.
        unbiased: take one off the number of tokens in the variance.
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
