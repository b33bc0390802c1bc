"""Moments over all ranks, and the normalization of token rewards and advantages with them.

Statistics are taken in float64 and in two passes: the mean, then the squares around it. Every rank
calls ``reduce`` equally often, whether it has rows or not: a rank that left it out
would block the others.

A normaliser of advantages is a function of (advantages, response_mask, groups, reduce), with
options by keyword:

Args:
    advantages: [B, R], this rank's rows.
    response_mask: [B, R] bool; in a run False on responses without a score.
    groups: normalization.Groups, the prompt of each row, numbered over the whole step.
    reduce: normalization.Reduce, called equally often by every rank, whether it has rows or not.
    ddof: delta degrees of freedom of the variance: 1 is the sample variance, 0 the population's.
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
    """The groups of rows, such as the samples of a prompt, over all ranks.

    Args:
        index: [B] int64, the group of each of this rank's rows, from 0 on.
        count: the number of groups on all ranks.
    """

    index: Tensor
    count: int


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Number, mean and population variance of the counting entries on all ranks; float64 scalars, or [G] by group."""

    count: Tensor
    mean: Tensor
    variance: Tensor

    def variance_of(self, ddof: int) -> Tensor:
        """The population variance, or with ``ddof`` 1 the sample variance, which is 0 of one entry."""
        return self.variance * self.count / (self.count - 1).clamp(min=1) if ddof else self.variance


def reduced_sums(reduce: Reduce, *entries: Tensor) -> list[float]:
    """The sum of each scalar over all ranks, in one reduction."""
    return [float(total) for total in reduce(torch.stack([entry.double() for entry in entries]))]


def masked_moments(values: Tensor, mask: Tensor, reduce: Reduce) -> Moments:
    """The moments of the entries on the mask, of any shape; all 0 without any. Calls ``reduce`` twice."""
    together = Groups(index=torch.zeros(mask.shape[:1], dtype=torch.int64, device=mask.device), count=1)
    moments = grouped_moments(values, mask, together, reduce)
    return Moments(count=moments.count[0], mean=moments.mean[0], variance=moments.variance[0])


def grouped_moments(values: Tensor, mask: Tensor, groups: Groups, reduce: Reduce) -> Moments:
    """The moments of each group's entries on the mask, [B, ...]; all 0 without any. Calls ``reduce`` twice."""
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
    """(x - mean) / sqrt(variance + eps) with the moments of the entries on the mask; maps those off the mask likewise.

    Args:
        keep_mean: add the mean again.
        form: of the divisor, see ``whiten_advantages``; with ``mean_only`` nothing is divided.
    """
    moments = masked_moments(values, mask, reduce)
    divisor = torch.ones_like(moments.mean) if mean_only else _DIVISORS[form](moments.variance_of(ddof), eps)
    whitened = (values.double() - moments.mean) / divisor
    return (whitened + moments.mean if keep_mean else whitened).to(values.dtype)


def on_mask(values: Tensor, mask: Tensor) -> Tensor:
    """The values, and 0 off the mask, where they may be anything."""
    return torch.where(mask, values, torch.zeros_like(values))


def whiten_rewards(rewards: Tensor, response_mask: Tensor, reduce: Reduce) -> Tensor:
    """(r - mean) / sqrt(variance + 1e-8) + mean, over the tokens of the step: variance 1, the same mean.

    Source: lm-human-preferences, there per rank and mini-batch.
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

    ``ddof`` 1 is the sample variance. ``form`` var_clamp divides by sqrt(max(variance, eps)),
    std_plus_eps by sqrt(variance) + eps; with ``mean_only`` nothing is divided.
    Source: lm-human-preferences and NeMo-Aligner (as here); verl and TRL (ddof 1); OpenRLHF
    (var_clamp, and mean_only); AReaL (std_plus_eps, eps 1e-5).

    Args:
        form: the divisor: sqrt(variance + eps), sqrt(max(variance, eps)), or the deviation + eps.
        mean_only: subtract the mean, without a division.
        eps: keeps the divisor above 0.
    """
    whitened = standardise(advantages, response_mask, reduce, ddof=ddof, form=form, mean_only=mean_only, eps=eps)
    return on_mask(whitened, response_mask)


def grouped_tokens(
    advantages: Tensor, response_mask: Tensor, groups: Groups, reduce: Reduce, *, ddof: DDof = 0, eps: Positive = 1e-5
) -> Tensor:
    """(A - mean) / (deviation + eps), over the response tokens of each prompt's samples; long responses weigh more.

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

    c = A - mean, with ``leave_one_out`` the mean of the other tokens, which is 0 for a single
    token. The deviation is sqrt(sum(c^2) / n), around the mean that was subtracted; with
    ``unbiased`` n - 1 replaces n, and the deviation of a single token is 1. Source: AReaL,
    NormConfig; its presets are batch and batch (PPO), group and batch (LitePPO), group and none
    (Dr. GRPO; with leave_one_out RLOO).

    Args:
        mean: level of the mean; None subtracts nothing.
        std: level of the deviation; None does not divide.
        leave_one_out: leave each token out of the mean that is subtracted from it.
        unbiased: divide the sum of squares by n - 1.
    """
    of_level = {"batch": Groups(index=torch.zeros_like(groups.index), count=1), "group": groups}
    centred = on_mask(advantages.double(), response_mask)
    if mean is not None:
        moments = grouped_moments(centred, response_mask, of_level[mean], reduce)
        subtracted = moments.mean[of_level[mean].index, None]
        if leave_one_out:
            count = moments.count[of_level[mean].index, None]
            of_others = (subtracted * count - centred) / (count - 1).clamp(min=1)
            subtracted = torch.where(count > 1, of_others, torch.zeros_like(centred))
        centred = on_mask(centred - subtracted, response_mask)
    if std is not None:
        moments = grouped_moments(centred.square(), response_mask, of_level[std], reduce)
        total = moments.mean * moments.count
        deviation = (total / (moments.count - int(unbiased)).clamp(min=1)).sqrt()
        if unbiased:
            deviation = torch.where(moments.count > 1, deviation, torch.ones_like(deviation))
        centred = centred / (deviation[of_level[std].index, None] + eps)
    return centred.to(advantages.dtype)
