"""Rewards of response tokens, and the shaping of the scores of responses before advantages are made of them.

The order is: the scale of the reward model, the limits, then the score of a response that did not end; comparisons of
samples and rewards of tokens come after all of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from megarl.algos.normalization import on_mask
from megarl.bounds import NotNegative, Positive


@dataclass(frozen=True, kw_only=True)
class Ends:
    """Where responses end.

    Args:
        kept: [B, R] bool, the tokens up to the end, its own token included; all of them where there is no end.
        lengths: [B] int64, the number of kept tokens.
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
        tokens: ids of the end tokens.
        after: index of the first token that may end a response.
    """
    columns = torch.arange(response_ids.shape[1], device=response_ids.device)
    ends = torch.isin(response_ids, torch.tensor(tokens, device=response_ids.device)) & response_mask
    ends = ends & (columns >= after)
    ended_before = ends.cumsum(-1) - ends.long() > 0
    kept = response_mask & ~ended_before
    return Ends(kept=kept, lengths=kept.sum(-1), found=ends.any(-1))


def clip_scores(scores: Tensor, low: float, high: float) -> Tensor:
    """Scores within [low, high]; before anything is subtracted from them, be it the mean of a group.

    Source: DeepSpeed-Chat and ColossalChat, +-5; AReaL, +-20; OpenRLHF, +-10 and after the mean.
    """
    return scores.clamp(low, high)


def replace_missing_end(scores: Tensor, finished: Tensor, *, score: float = -1.0) -> Tensor:
    """A response that did not end gets a fixed score, whatever it earned: s = score.

    Source: lm-human-preferences, where a sample without the stop token scores -1; OpenRLHF, a negative
    stop_properly_penalty_coef. The fixed score is not clipped: apply it after ``clip_scores``.

    Args:
        scores: [N].
        finished: [N] bool, True where the model ended the response itself.
        score: the score.
    """
    return torch.where(finished, scores, torch.full_like(scores, score))


def subtract_missing_end(scores: Tensor, finished: Tensor, *, penalty: Positive) -> Tensor:
    """A response that did not end loses a fixed amount: s = s - penalty.

    Source: TRL, missing_eos_penalty.

    Args:
        penalty: the penalty.
    """
    return torch.where(finished, scores, scores - penalty)


def scale_missing_end(scores: Tensor, finished: Tensor, *, factor: NotNegative) -> Tensor:
    """A response that did not end keeps a part of its score: s = factor * s.

    Source: OpenRLHF, a stop_properly_penalty_coef between 0 and 1.

    Args:
        factor: the factor.
    """
    return torch.where(finished, scores, factor * scores)


def zero_missing_end(scores: Tensor, finished: Tensor) -> Tensor:
    """A response that did not end scores nothing: s = 0.

    Source: AReaL, mask_no_eos_with_zero.
    """
    return torch.where(finished, scores, torch.zeros_like(scores))


def keep_finished(response_mask: Tensor, finished: Tensor) -> Tensor:
    """The tokens of responses that ended: the others do not train the policy, whatever they score.

    Their scores still count in what others are compared with, and their tokens in the denominators. Source: TRL,
    mask_truncated_completions; NeMo-Aligner, is_end.

    Args:
        finished: [B] bool, True where the model ended the response itself.
    """
    return response_mask & finished[:, None]


@dataclass(frozen=True, kw_only=True)
class ScoreScale:
    """score = gain * raw + bias: mean ``target_mean`` and deviation ``target_std`` on the samples that were measured.

    Source: lm-human-preferences, which measures before the training of a reward model and again after it.

    Args:
        mean: of the raw scores; ``std`` likewise.
    """

    mean: float = 0.0
    std: float = 1.0
    target_mean: float = 0.0
    target_std: float = 1.0

    @property
    def gain(self) -> float:
        """target_std / std."""
        return self.target_std / self.std

    @property
    def bias(self) -> float:
        """target_mean - gain * mean."""
        return self.target_mean - self.gain * self.mean

    def apply(self, raw: Tensor) -> Tensor:
        """[N] raw scores -> [N]; shifted before they are scaled, so that nothing is lost where the mean is large."""
        return (raw - self.mean) * self.gain + self.target_mean


def score_scale(
    raw: Tensor, *, target_mean: float = 0.0, target_std: float = 1.0, ddof: Literal[0, 1] = 0
) -> ScoreScale:
    """The scale that gives these raw scores of reference samples the mean and deviation that are asked for.

    gain = target_std / deviation;  bias = target_mean - gain * mean. Source: lm-human-preferences, with the population
    deviation; lm-human-preference-details, with the sample deviation.

    Args:
        raw: [N].
        ddof: degrees of freedom that are taken off N in the variance.

    Raises:
        ValueError: all scores are equal.
    """
    values = raw.double()
    if len(values) == 0 or values.min() == values.max():
        raise ValueError(
            f"{len(values)} reference samples without two different scores: their scale says nothing;"
            " take other samples, or look whether the reward model has learnt anything"
        )
    mean, std = float(values.mean()), float(values.std(correction=ddof))
    return ScoreScale(mean=mean, std=std, target_mean=target_mean, target_std=target_std)


def head_std(hidden: int, *, rule: Literal["inverse_sqrt", "inverse"] = "inverse_sqrt") -> float:
    """Deviation of the initial weights of a reward model's head: 1 / sqrt(hidden + 1), or 1 / (hidden + 1).

    Source: lm-human-preferences (inverse_sqrt); OpenRLHF and ColossalChat (inverse).

    Args:
        hidden: width of the model.
    """
    return 1 / math.sqrt(hidden + 1) if rule == "inverse_sqrt" else 1 / (hidden + 1)


Placement = Literal["last_valid", "last_column", "after_last", "every_valid"]
"""Where the score of a response stands; see token_rewards."""


def kl_penalties(kl: Tensor, response_mask: Tensor, *, kl_coef: float) -> Tensor:
    """-kl_coef * kl[t], the part of a token's reward that is not the score; 0 off the mask.

    Source: lm-human-preferences; Stiennon et al., "Learning to summarize from human feedback" (2020).

    Args:
        kl: [B, R] nats, an estimate per token.
        kl_coef: reward per nat; a negative one counts as 0.
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
