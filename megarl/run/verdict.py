"""The verdict on a finished run: whether it learned."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev
from typing import Any, Final

from megarl.run.display import short
from megarl.run.health import Line
from megarl.run.health_monitor import HealthFinding

_INTERVAL: Final = "_ci95"
_SCORE = "eval/score"
_OTHERS = ("eval/response_length", "eval/truncated_fraction")
"""Metrics of evaluations with an interval that are no scores."""
_OF_TRAINING = ("objective/score", "reward_model/accuracy", "sft/loss")
_FALLS = ("eval/loss", "sft/loss")
"""The less, the better."""
_AVERAGED = 10
_LEAST_STEPS = 6
"""Averaging window, and the fewest steps for a verdict."""
_STANDARD_ERRORS = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True, kw_only=True)
class _Point:
    """A measured value at a step, with half the width of its 95% interval."""

    step: int
    value: float
    half_width: float

    def __str__(self) -> str:
        return f"{short(self.value, 3)} ± {self.half_width:.2g}" if self.half_width else short(self.value, 3)

    def beats(self, other: _Point, sign: int) -> bool:
        """Whether it is better by more than the noise of both; `sign` is -1 where less is better."""
        return sign * (self.value - other.value) > math.hypot(self.half_width, other.half_width)


def judge(lines: Sequence[Line], evaluations: Sequence[Mapping[str, Any]], findings: Sequence[HealthFinding]) -> str:
    """Returns the verdict in a sentence; empty if the run is too short for one.

    The run has learned if its held-out score rose by more than the noise, or its training score if it has no two
    evaluations; a harmful finding that lasts is named beside it, as the score may be exploited. It has collapsed if it
    lost more than half of what it had gained, or became worse than at the start while a harmful finding began.

    Args:
        lines, evaluations: of all steps, as in the files.
    """
    metric, points = next(_histories(lines, evaluations), ("", []))
    if not points:
        return ""
    sign = -1 if metric in _FALLS else 1
    first = points[0]
    last = points[-1]
    best = max(points, key=lambda point: sign * point.value)
    name = metric.removeprefix("eval/")
    measured = f"{f'held-out {name}' if name != metric else f'{name} in training'} {first} -> {last}"
    lost = sign * (best.value - last.value)
    gained = sign * (best.value - first.value)
    if best.beats(last, sign) and 2 * lost > gained:
        fallen = next(point.step for point in points if point.step > best.step and best.beats(point, sign))
        harmful = [finding for finding in findings if finding.check.harmful and best.step < finding.first <= fallen]
        causes = sorted(harmful, key=lambda finding: finding.first)[:1]
        if causes or best.beats(first, sign):
            peak = f", best {best} at step {best.step}" if best is not first else ""
            at = causes[0].first if causes else fallen
            return "; ".join([f"collapsed at step {at}: {measured}{peak}", *(finding.text for finding in causes)])
    lasting = [finding for finding in findings if finding.last is None]
    if last.beats(first, sign):
        harmful = [finding.text for finding in lasting if finding.check.harmful]
        return "; but ".join([f"learned: {measured}", *harmful[:1]])
    outcome = "became worse" if first.beats(last, sign) else "no clear change"
    return "; ".join([f"{outcome}: {measured}", *(finding.text for finding in lasting[:1])])


def _histories(lines: Sequence[Line], evaluations: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[_Point]]]:
    """Yields the metrics that tell what was learned, the best one first, with at least two points each."""
    last = evaluations[-1] if evaluations else {}
    scores = [name for name in last if f"{name}{_INTERVAL}" in last and "_pass_at_" not in name]
    functions = [name for name in scores if name not in (_SCORE, *_OTHERS) and name.startswith("eval/")]
    for metric in (*functions, _SCORE, "eval/accuracy", "eval/loss"):
        points = [
            _Point(step=line["step"], value=line[metric], half_width=line.get(f"{metric}{_INTERVAL}") or 0.0)
            for line in evaluations
            if line.get(metric) is not None
        ]
        if len(points) > 1:
            yield metric, points
    for metric in _OF_TRAINING:
        known = [line for line in lines if line.get(metric) is not None]
        if len(known) >= _LEAST_STEPS:
            yield metric, _averages(known, metric)


def _averages(lines: Sequence[Line], metric: str) -> list[_Point]:
    """Returns the means over equal parts of the run."""
    size = min(_AVERAGED, len(lines) // 2)
    parts = [lines[max(0, end - size) : end] for end in range(len(lines), size - 1, -size)][::-1]
    values = [(part[-1]["step"], [line[metric] for line in part]) for part in parts]
    error = _STANDARD_ERRORS / math.sqrt(size)
    return [_Point(step=step, value=fmean(of), half_width=error * stdev(of)) for step, of in values]
