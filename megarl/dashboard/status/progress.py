"""Steps, pace and health of a run, from its last steps. Times are seconds since 1970."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from megarl.run.health import HealthFinding, Limits, Lines, metric_values, shortened, watch
from megarl.run.sinks import WRITTEN


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The speed of the last `steps` steps, evaluations and checkpoints included; `longest` in seconds."""

    steps: int
    seconds_per_step: float
    longest: float


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The steps of a run.

    Args:
        step: last step; 0 before the first.
        steps: number of the run's steps; None if the configuration has none, as of a standalone evaluation.
        stepped: time at which the last step was written; None before the first.
    """

    step: int
    steps: int | None
    stepped: float | None
    pace: Pace | None

    def seconds_left(self, now: float) -> float | None:
        """Returns the remaining seconds of a running run, if known; a late step counts as almost taken."""
        if self.pace is None or self.steps is None or self.stepped is None:
            return None
        each = self.pace.seconds_per_step
        return max(0.0, (self.steps - self.step) * each - min(now - self.stepped, each))


def measure_pace(lines: Lines, starts: Sequence[float]) -> Pace | None:
    """Returns the speed of the last steps, if known; the time before the attempts' starts does not count."""
    written = metric_values(lines, WRITTEN)
    seconds: list[float] = []
    for before, after in pairwise(written):
        if not any(before < start <= after for start in starts):
            seconds.append(after - before)
    if not seconds:  # the start of a first step is not recorded
        seconds = metric_values(lines, "time/step")
    if sum(seconds) <= 0.0:
        return None
    return Pace(steps=len(seconds), seconds_per_step=sum(seconds) / len(seconds), longest=max(seconds))


def find_warnings(lines: Lines, logs: Path, limits: Limits) -> Iterator[str]:
    """Yields a sentence per finding of the health checks, and one for logs that are not empty."""
    for finding in watch(lines, limits=limits).findings:
        yield f"{_when(finding, lines[0]['step'])}: {finding.text}"
    if files := sorted(path.name for path in logs.glob("*.log") if path.stat().st_size):
        yield f"printed into {logs}: {shortened(files)}"


def _when(finding: HealthFinding, first: int) -> str:
    """Returns the steps of a finding; one that begins with the first line that was read may be older."""
    if finding.last == finding.first:
        return f"in step {finding.first}"
    if finding.last is not None:
        return f"in steps {finding.first} to {finding.last}"
    if finding.check.steps > 1 and first > 1 and finding.first < first + finding.check.steps:
        return f"since step {finding.first} or before"
    return f"since step {finding.first}"
