"""The verdict on a finished run: whether it learned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

from megarl.run.display import short
from megarl.run.health import HealthFinding, Line, nothing_scores

_INTERVAL = "_ci95"
_SCORE = "eval/score"
_OTHERS = ("eval/response_length", "eval/truncated_fraction")
"""Metrics of evaluations with an interval that are no scores."""
_TO_TEACHER = "objective/kl_per_token"
"""What falls where nothing scores and a teacher teaches."""
_TRAINING_METRICS = (
    "objective/score",
    _TO_TEACHER,
    "reward_model/accuracy",
    "sft/loss",
    "dpo/loss",
)
_FALLS = ("eval/loss", _TO_TEACHER, "sft/loss", "dpo/loss")
"""Metrics that fall in a run that learns."""
_IMPLICIT = frozenset(("eval/logprob", "eval/logprob_chosen"))
"""Metrics of evaluations whose accuracy is of implicit rewards."""
_AVERAGED = 10
_MIN_STEPS = 6
"""Averaging window, and the fewest steps for a verdict."""
_UNKNOWN_NOISE = 0.01
"""Noise of a value without an interval, a held-out loss, as a part of it."""
STANDARD_ERRORS = NormalDist().inv_cdf(0.975)
"""Half the width of the 95% interval of a standard normal distribution."""


@dataclass(frozen=True, kw_only=True)
class _Point:
    """A measured value at a step, with half the width of its 95% interval if it has one."""

    step: int
    value: float
    half_width: float | None

    def __str__(self) -> str:
        value = short(self.value, 3)
        if self.half_width:
            return f"{value} ± {self.half_width:.2g}"
        return value

    def beats(self, other: _Point, sign: int) -> bool:
        """Whether it is better by more than the noise of both; `sign` is -1 where less is better."""
        return sign * (self.value - other.value) > math.hypot(self._noise, other._noise)

    @property
    def _noise(self) -> float:
        if self.half_width is None:
            return _UNKNOWN_NOISE * abs(self.value)
        return self.half_width


def judge(lines: Sequence[Line], evaluations: Sequence[Line], findings: Sequence[HealthFinding]) -> str:
    """Returns the verdict in a sentence; empty if the run is too short for one.

    The run has learned if its held-out score rose by more than the noise, or its training score if
    it has no two evaluations; a harmful finding that lasts is named beside it, as the score may be
    exploited. It has collapsed if it lost more than half of what it had gained, or became worse
    than at the start while a harmful finding began.

    Args:
        lines, evaluations: lines of all steps, as in the files.
        findings: in the order of their first steps.
    """
    metric, points = _history(lines, evaluations)
    if not points:
        return ""
    sign = -1 if metric in _FALLS else 1
    first = points[0]
    last = points[-1]
    best = max(points, key=lambda point: sign * point.value)
    measured = f"{metric} in training {first} -> {last}"
    if metric.startswith("eval/"):
        measured = f"held-out {metric.removeprefix('eval/')} {first} -> {last}"
    lost = sign * (best.value - last.value)
    gained = sign * (best.value - first.value)
    if best.beats(last, sign) and 2 * lost > gained:
        fallen = next(point.step for point in points if point.step > best.step and best.beats(point, sign))
        harmful = [finding for finding in findings if finding.check.harmful and best.step < finding.first <= fallen]
        peak = "" if best is first else f", best {best} at step {best.step}"
        if harmful:
            return f"collapsed at step {harmful[0].first}: {measured}{peak}; {harmful[0].text}"
        if best.beats(first, sign):
            return f"collapsed at step {fallen}: {measured}{peak}"
    lasting = [finding for finding in findings if finding.last is None]
    if last.beats(first, sign):
        harmful = [finding.text for finding in lasting if finding.check.harmful]
        return "; but ".join([f"learned: {measured}", *harmful[:1]])
    outcome = "became worse" if first.beats(last, sign) else "no clear change"
    return "; ".join([f"{outcome}: {measured}", *(finding.text for finding in lasting[:1])])


def _history(lines: Sequence[Line], evaluations: Sequence[Line]) -> tuple[str, list[_Point]]:
    """Returns the metric that says most about learning, of those with at least two points, and these."""
    for metric in (*_reported_functions(evaluations), _SCORE, "eval/accuracy", "eval/loss"):
        points: list[_Point] = []
        for line in evaluations:
            if metric == "eval/accuracy" and not _IMPLICIT.isdisjoint(line):
                continue  # noise where the policy still equals its reference
            if line.get(metric) is not None:
                half_width = line.get(f"{metric}{_INTERVAL}")
                points.append(_Point(step=line["step"], value=line[metric], half_width=half_width))
        if len(points) > 1:
            return metric, points
    for metric in _TRAINING_METRICS:
        if metric == _TO_TEACHER and not all(map(nothing_scores, lines)):
            continue
        known = [line for line in lines if line.get(metric) is not None]
        if len(known) >= _MIN_STEPS:
            return metric, _averages(known, metric)
    return "", []


def _reported_functions(evaluations: Sequence[Line]) -> list[str]:
    """Returns the scores of functions in the last evaluation."""
    found: list[str] = []
    for name in evaluations[-1] if evaluations else ():
        has_interval = f"{name}{_INTERVAL}" in evaluations[-1]
        if has_interval and name.startswith("eval/") and "_pass_at_" not in name and name not in (_SCORE, *_OTHERS):
            found.append(name)
    return found


def _averages(lines: Sequence[Line], metric: str) -> list[_Point]:
    """Returns the means over equal parts of the run."""
    size = min(_AVERAGED, len(lines) // 2)
    error = STANDARD_ERRORS / math.sqrt(size)
    points: list[_Point] = []
    for end in range(len(lines), size - 1, -size):
        values = [line[metric] for line in lines[end - size : end]]
        step = lines[end - 1]["step"]
        points.append(_Point(step=step, value=fmean(values), half_width=error * stdev(values)))
    return points[::-1]
