"""How fast a run goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from megarl.run.sinks import WRITTEN

_STEP_SECONDS = "time/step"
_HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Of the last steps, with the evaluations and checkpoints between them.

    Args:
        steps: that were measured.
        seconds_per_step: on average.
        longest: seconds of the longest.
        steps_per_hour: on average.
    """

    steps: int
    seconds_per_step: float
    longest: float
    steps_per_hour: float


def pace_of(lines: Sequence[Mapping[str, Any]], starts: Sequence[float]) -> Pace | None:
    """How fast the steps follow each other; None where that cannot be known yet.

    Args:
        lines: of metrics.jsonl, the last ones.
        starts: of the attempts: what lies between two of them is no step.
    """
    written = [line[WRITTEN] for line in lines if line.get(WRITTEN) is not None]
    apart = [b - a for a, b in pairwise(written) if not any(a < start <= b for start in starts)]
    # Of a first step, nobody has written when it began.
    seconds = apart or [line[_STEP_SECONDS] for line in lines if line.get(_STEP_SECONDS) is not None]
    mean = sum(seconds) / len(seconds) if seconds else 0.0
    if mean <= 0.0:
        return None
    return Pace(steps=len(seconds), seconds_per_step=mean, longest=max(seconds), steps_per_hour=_HOUR / mean)
