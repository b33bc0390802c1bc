"""Shaping of a sample's score."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from tests.oracle.models import Sample

Shape = Callable[[float, Sample], float]
"""The score from here on, from the score so far and the sample."""


def shaped(sample: Sample, shapes: Sequence[Shape]) -> float | None:
    """The sample's score after all functions in order; None where it has none."""
    if sample.score is None:
        return None
    score = sample.score
    for shape in shapes:
        score = shape(score, sample)
    return score


def clipped(score: float, sample: Sample, *, low: float = -math.inf, high: float = math.inf) -> float:
    """Within the bounds."""
    del sample
    return min(max(score, low), high)


def replaced(score: float, sample: Sample, *, score_of_unfinished: float = -1.0) -> float:
    """A constant in place of the score of an unfinished response."""
    return score if sample.finished else score_of_unfinished


def overlong(score: float, sample: Sample, *, most: int, buffer: int, factor: float = 1.0) -> float:
    """The score minus a penalty that grows over the last allowed tokens, up to factor at the limit."""
    beyond = min(len(sample.sampled) - (most - buffer), buffer)
    return score + min(0.0, -beyond / buffer * factor)


def truncated(sample: Sample, token: int, after: int = 0) -> Sample:
    """The response up to the first such token at an index of at least ``after``; unfinished where there is none."""
    for index, found in enumerate(sample.response_ids):
        if index >= after and found == token:
            return replace(sample, response_ids=sample.response_ids[: index + 1], finished=True)
    return replace(sample, finished=False)
