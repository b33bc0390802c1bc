"""What is done to the scores of responses before advantages are made of them, and the scale of a reward model.

The order is: the scale of the reward model, the limits, then the score of a response that did not end; comparisons of
samples and rewards of tokens come after all of these.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


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
        score: what the others get.
    """
    return torch.where(finished, scores, torch.full_like(scores, score))


def subtract_missing_end(scores: Tensor, finished: Tensor, *, penalty: float) -> Tensor:
    """A response that did not end loses a fixed amount: s = s - penalty.

    Source: TRL, missing_eos_penalty.

    Args: as for replace_missing_end; ``penalty`` is what the others lose.
    """
    return torch.where(finished, scores, scores - penalty)


def scale_missing_end(scores: Tensor, finished: Tensor, *, factor: float) -> Tensor:
    """A response that did not end keeps a part of its score: s = factor * s.

    Source: OpenRLHF, a stop_properly_penalty_coef between 0 and 1.

    Args: as for replace_missing_end; ``factor`` is what the scores of the others are multiplied by.
    """
    return torch.where(finished, scores, factor * scores)


def zero_missing_end(scores: Tensor, finished: Tensor) -> Tensor:
    """A response that did not end scores nothing: s = 0.

    Source: AReaL, mask_no_eos_with_zero.

    Args: as for replace_missing_end.
    """
    return torch.where(finished, scores, torch.zeros_like(scores))


def keep_finished(response_mask: Tensor, finished: Tensor) -> Tensor:
    """The tokens of responses that ended: the others do not train the policy, whatever they score.

    Their scores still count in what others are compared with, and their tokens in the denominators. Source: TRL,
    mask_truncated_completions; NeMo-Aligner, is_end.

    Args:
        response_mask: [B, R] bool.
        finished: [B] bool, True where the model ended the response itself.

    Returns:
        [B, R] bool, True where a token is learnt from.
    """
    return response_mask & finished[:, None]


@dataclass(frozen=True, kw_only=True)
class ScoreScale:
    """score = gain * raw + bias: mean ``target_mean`` and deviation ``target_std`` on the samples that were measured.

    Source: lm-human-preferences, which measures before the training of a reward model and again after it.

    Args:
        mean: of the raw scores.
        std: of the raw scores.
        target_mean: that they get.
        target_std: that they get.
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
        target_mean: of the scaled scores.
        target_std: of the scaled scores.
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
        rule: which of the two.
    """
    return 1 / math.sqrt(hidden + 1) if rule == "inverse_sqrt" else 1 / (hidden + 1)
