"""One advantage per sample, from the scores of the samples of its prompt.

Every function takes the samples of a step and their scores, None where scoring failed: these
get 0, and the others are compared as if they were absent.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from tests.oracle.models import Sample

Scores = Sequence[float | None]


def grpo(samples: Sequence[Sample], scores: Scores, *, eps: float = 1e-6, ddof: int = 1) -> list[float]:
    """(score - mean) / (deviation + eps)."""
    return _each(samples, scores, lambda own, all_: _standardised(own, all_, eps, ddof))


def dr_grpo(samples: Sequence[Sample], scores: Scores) -> list[float]:
    """score - mean."""
    return _each(samples, scores, lambda own, all_: own - statistics.fmean(all_))


def rloo(samples: Sequence[Sample], scores: Scores) -> list[float]:
    """score - mean of the others."""
    return _each(samples, scores, lambda own, all_: own - statistics.fmean(_others(own, all_)))


def rloo_std(samples: Sequence[Sample], scores: Scores, *, eps: float = 1e-6) -> list[float]:
    """(score - mean of the others) / (deviation of the others + eps), undivided where they do not deviate."""

    def one(own: float, all_: list[float]) -> float:
        others = _others(own, all_)
        deviation = statistics.stdev(others) if len(others) > 1 else 0.0
        difference = own - statistics.fmean(others)
        return difference / (deviation + eps) if deviation > 0 else difference

    return _each(samples, scores, one)


def opo(samples: Sequence[Sample], scores: Scores) -> list[float]:
    """score - mean weighted by response length."""
    result = [0.0] * len(samples)
    for group in _groups(samples, scores):
        weight = sum(len(samples[i].sampled) for i in group) or 1
        mean = sum(len(samples[i].sampled) * _known(scores[i]) for i in group) / weight
        for i in group:
            result[i] = _known(scores[i]) - mean if len(group) > 1 else 0.0
    return result


def pass_at_k(samples: Sequence[Sample], scores: Scores, *, eps: float = 1e-6) -> list[float]:
    """The best sample alone: (best - second best) / (deviation + eps)."""

    def one(own: float, all_: list[float]) -> float:
        second, best = sorted(all_)[-2:]
        return (best - second) / (statistics.stdev(all_) + eps) if own == best else 0.0

    return _each(samples, scores, one)


def batch_std(samples: Sequence[Sample], scores: Scores, *, eps: float = 1e-6) -> list[float]:
    """(score - mean of the group) / (deviation of all samples + eps)."""
    known = [score for score in scores if score is not None]
    deviation = statistics.stdev(known)
    return [difference / (deviation + eps) for difference in dr_grpo(samples, scores)]


def masked_rloo(samples: Sequence[Sample], scores: Scores) -> list[float]:
    """score - (sum of the others that the model ended itself) / (their number in the group, itself included, - 1).

    A sample that did not end itself is no part of the number; it is masked out of the loss.
    """
    known = [(sample, score) for sample, score in zip(samples, scores, strict=True) if score is not None]
    advantages: list[float] = []
    for sample, score in zip(samples, scores, strict=True):
        ended = [(other, theirs) for other, theirs in known if other.group == sample.group and other.finished]
        if score is None or len(ended) < 2:
            advantages.append(0.0)
        else:
            others = sum(theirs for other, theirs in ended if other is not sample)
            advantages.append(score - others / (len(ended) - 1))
    return advantages


def none(samples: Sequence[Sample], scores: Scores) -> list[float]:
    """Nothing is compared."""
    return [0.0] * len(samples)


def remax(samples: Sequence[Sample], scores: Scores) -> list[float]:
    """score - score of the greedy response."""
    return [
        0.0 if score is None else score - sample.greedy_score for sample, score in zip(samples, scores, strict=True)
    ]


def gpg(samples: Sequence[Sample], scores: Scores) -> list[float]:
    """(score - mean) * samples / samples with an advantage other than 0."""
    centred = dr_grpo(samples, scores)
    counting = sum(value != 0 for value in centred)
    return [value * sum(s is not None for s in scores) / counting if counting else 0.0 for value in centred]


def gdpo(samples: Sequence[Sample], scores: Scores, *, weights: Sequence[float], eps: float = 1e-6) -> list[float]:
    """The weighted sum of what ``grpo`` makes of each component."""
    parts = [grpo(samples, [s.components[k] for s in samples], eps=eps) for k in range(len(weights))]
    return [sum(w * part[i] for w, part in zip(weights, parts, strict=True)) for i in range(len(samples))]


def reward_to_go_of(outcome: float, penalties: Sequence[float], *, cumulative: bool) -> list[float]:
    """The advantages of a sample's tokens: its outcome, and the penalties from each token on, or each token's own."""
    if cumulative:
        return [outcome + math.fsum(penalties[t:]) for t in range(len(penalties))]
    return [outcome + penalty for penalty in penalties]


def _each(samples: Sequence[Sample], scores: Scores, one: Callable[[float, list[float]], float]) -> list[float]:
    """Applies ``one`` to each score and the scores of its group; 0 for groups of one."""
    result = [0.0] * len(samples)
    for group in _groups(samples, scores):
        all_ = [_known(scores[i]) for i in group]
        for i in group:
            result[i] = 0.0 if len(group) == 1 else one(_known(scores[i]), all_)
    return result


def _groups(samples: Sequence[Sample], scores: Scores) -> list[list[int]]:
    names = sorted({sample.group for sample in samples})
    return [[i for i, sample in enumerate(samples) if sample.group == name and scores[i] is not None] for name in names]


def _standardised(own: float, all_: Sequence[float], eps: float, ddof: int) -> float:
    if len(set(all_)) == 1:
        return 0.0
    deviation = statistics.stdev(all_) if ddof else statistics.pstdev(all_)
    return (own - statistics.fmean(all_)) / (deviation + eps)


def _others(own: float, all_: Sequence[float]) -> list[float]:
    others = list(all_)
    others.remove(own)
    return others


def _known(score: float | None) -> float:
    assert score is not None
    return score
