"""The shaping of response scores, and the rewards of response tokens.

The order is: the scale of the reward model, the clip, the treatment of unfinished responses; then
group advantages or token rewards.

    scores: [N].
    finished: [N] bool, True where the model ended the response itself.
    score: fixed score of an unfinished response.
    penalty: subtracted from the score of an unfinished response.
    factor: multiplies the score of an unfinished response.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megarl.algos.normalization import on_mask
from megarl.bounds import NotNegative, Positive


def first_end(
    response_ids: Tensor, response_mask: Tensor, tokens: Sequence[int], *, after: int = 0
) -> tuple[Tensor, Tensor]:
    """Ends each response at the first of the end tokens ``tokens`` at an index of at least ``after``.

    It looks for the tokens, not for padding, so that the padding token may be an end token. Source:
    lm-human-preferences, whose reward model sees a response up to its first full stop or line break
    after a minimum of tokens; verl, get_response_mask, for several end tokens.

    Returns:
        The tokens up to and including the end token, or all of them, [B, R] bool; whether there is
        one, [B] bool.
    """
    columns = torch.arange(response_ids.shape[1], device=response_ids.device)
    ends = torch.isin(response_ids, torch.tensor(tokens, device=response_ids.device)) & response_mask
    ends = ends & (columns >= after)
    ended_before = ends.cumsum(-1) - ends.long() > 0
    return response_mask & ~ended_before, ends.any(-1)


def clip_scores(scores: Tensor, low: float, high: float) -> Tensor:
    """Scores clipped to [low, high], before anything is subtracted from them, such as the mean of a group.

    Source: DeepSpeed-Chat and ColossalChat, +-5; AReaL, +-20; OpenRLHF, +-10 and after the mean.
    """
    return scores.clamp(low, high)


def replace_missing_end(scores: Tensor, finished: Tensor, *, score: float = -1.0) -> Tensor:
    """An unfinished response gets a fixed score, which is not clipped: s = score.

    Source: lm-human-preferences, where a sample without the stop token scores -1; OpenRLHF, a
    negative stop_properly_penalty_coef.
    """
    return torch.where(finished, scores, torch.full_like(scores, score))


def subtract_missing_end(scores: Tensor, finished: Tensor, *, penalty: Positive) -> Tensor:
    """An unfinished response loses a fixed amount: s = s - penalty.

    Source: TRL, missing_eos_penalty.
    """
    return torch.where(finished, scores, scores - penalty)


def scale_missing_end(scores: Tensor, finished: Tensor, *, factor: NotNegative) -> Tensor:
    """An unfinished response keeps a part of its score: s = factor * s.

    Source: OpenRLHF, a stop_properly_penalty_coef between 0 and 1.
    """
    return torch.where(finished, scores, factor * scores)


def zero_missing_end(scores: Tensor, finished: Tensor) -> Tensor:
    """An unfinished response scores nothing: s = 0.

    Source: AReaL, mask_no_eos_with_zero.
    """
    return torch.where(finished, scores, torch.zeros_like(scores))


def keep_finished(response_mask: Tensor, finished: Tensor) -> Tensor:
    """The tokens of finished responses, [B, R] bool: the policy does not learn from the others.

    The scores of the others still count in the baselines of their groups, and their tokens in the
    denominators. Where no response of a step is finished, the actor takes no optimizer step.
    Source: TRL, mask_truncated_completions; NeMo-Aligner, is_end.
    """
    return response_mask & finished[:, None]


@dataclass(frozen=True, kw_only=True)
class ScoreScale:
    """score = gain * raw + bias, which maps raw scores of ``mean`` and ``std`` to ``target_mean`` and ``target_std``.

    Source: lm-human-preferences, which measures before the training of a reward model
    and again after it.
    """

    mean: float = 0.0
    std: float = 1.0
    target_mean: float = 0.0
    target_std: float = 1.0

    @property
    def gain(self) -> float:
        return self.target_std / self.std

    @property
    def bias(self) -> float:
        return self.target_mean - self.gain * self.mean

    def apply(self, raw: Tensor) -> Tensor:
        """[N] raw scores -> [N]; shifts before it scales, for precision where the mean is large."""
        return (raw - self.mean) * self.gain + self.target_mean


def score_scale(
    raw: Tensor, *, target_mean: float = 0.0, target_std: float = 1.0, ddof: Literal[0, 1] = 0
) -> ScoreScale:
    """The scale that gives the raw scores of reference samples, [N], the target mean and deviation.

    gain = target_std / deviation;  bias = target_mean - gain * mean. Source: lm-human-preferences, with the population
    deviation; lm-human-preference-details, with the sample deviation (``ddof`` 1).

    Raises:
        ValueError: all scores are equal.
    """
    values = raw.double()
    if len(values) == 0 or values.min() == values.max():
        raise ValueError(
            f"{len(values)} reference samples without two different scores have no scale;"
            " take other samples, or check that the reward model has learned anything"
        )
    mean = float(values.mean())
    std = float(values.std(correction=ddof))
    return ScoreScale(mean=mean, std=std, target_mean=target_mean, target_std=target_std)


def head_std(hidden: int, *, rule: Literal["inverse_sqrt", "inverse"] = "inverse_sqrt") -> float:
    """Deviation of the initial weights of a reward model's head: 1 / sqrt(hidden + 1), or 1 / (hidden + 1).

    Source: lm-human-preferences (inverse_sqrt); OpenRLHF and ColossalChat (inverse).
    """
    return 1 / math.sqrt(hidden + 1) if rule == "inverse_sqrt" else 1 / (hidden + 1)


def kl_penalties(kl: Tensor, response_mask: Tensor, *, kl_coef: float) -> Tensor:
    """-kl_coef * kl[t], the part of a token's reward that is not the score; 0 off the mask.

    Source: lm-human-preferences; Stiennon et al., "Learning to summarize from human
    feedback" (2020).

    Args:
        kl: [B, R] nats.
        kl_coef: reward per nat; a negative one counts as 0.
    """
    return on_mask(-max(kl_coef, 0.0) * kl, response_mask)


def token_rewards(
    scores: Tensor,
    penalties: Tensor,
    response_mask: Tensor,
    *,
    placement: Literal["last_valid", "every_valid"] = "last_valid",
) -> Tensor:
    """The penalties, plus the score at one token of the row.

    ``placement``: last_valid, the row's last counting token; every_valid, each counting token,
    which multiplies the score by the length. A row without a counting token has no reward.
    Source: InstructGPT (Ouyang et al., 2022), OpenRLHF, verl (last_valid); ColossalChat
    (every_valid).

    Args:
        scores: [B].
        penalties: [B, R], of ``kl_penalties``, 0 off the mask.
    """
    here = response_mask
    if placement == "last_valid":
        here = here & (here.flip(-1).cumsum(-1).flip(-1) == 1)
    return penalties + on_mask(scores[:, None].expand_as(penalties), here)


def dense_rewards(
    before: Tensor,
    after: Tensor,
    penalties: Tensor,
    response_mask: Tensor,
    *,
    differences: bool = False,
    clip: tuple[float, float] | None = None,
) -> Tensor:
    """The penalties, plus the score of the response so far, or with ``differences`` what the token adds to it.

    Tokens that do not count (of a tool, say) have no reward, and nobody gets what they add.
    Source: AReaL (legacy), dense rewards and reward_delta.

    Args:
        before, after: [B, R], the score before and after each token; ``clip`` bounds them first.
        penalties: [B, R], of ``kl_penalties``.
    """
    if clip is not None:
        before = before.clamp(*clip)
        after = after.clamp(*clip)
    return on_mask(penalties + (after - before if differences else after), response_mask)
