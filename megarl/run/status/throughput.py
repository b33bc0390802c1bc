"""Progress and speed of a run, and warnings about its last steps. Times are seconds since 1970."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from megarl.run.health import Limits, Lines, shortened
from megarl.run.health_monitor import watch
from megarl.run.sinks import WRITTEN

_STEP_SECONDS = "time/step"
_HOUR = 3600.0
_OVERDUE = 3.0
_OVERDUE_S = 60.0
"""A step is overdue after so many times the longest of the last steps, and so many seconds."""


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """The speed of the last `steps` steps, including evaluations and checkpoints; `longest` is in seconds."""

    steps: int
    seconds_per_step: float
    longest: float
    steps_per_hour: float


def measure_throughput(lines: Lines, starts: Sequence[float]) -> Throughput | None:
    """Returns the speed of the last steps, if known; the time before the attempts' starts does not count."""
    written = [line[WRITTEN] for line in lines if line.get(WRITTEN) is not None]
    apart = [b - a for a, b in pairwise(written) if not any(a < start <= b for start in starts)]
    # The start of a first step is not recorded.
    seconds = apart or [line[_STEP_SECONDS] for line in lines if line.get(_STEP_SECONDS) is not None]
    mean = sum(seconds) / len(seconds) if seconds else 0.0
    if mean <= 0.0:
        return None
    return Throughput(steps=len(seconds), seconds_per_step=mean, longest=max(seconds), steps_per_hour=_HOUR / mean)


@dataclass(frozen=True, kw_only=True)
class RunProgress:
    """The steps of a run.

    Args:
        step: the last one; 0 before the first.
        steps: of the whole run; None if no configuration states it, as in a standalone evaluation.
        stepped: when the last one was written; None before the first.
        pace: None while unknown.
    """

    step: int
    steps: int | None
    stepped: float | None
    pace: Throughput | None

    def seconds_left(self, now: float) -> float | None:
        """Returns the remaining seconds of a running run, if known; an overdue step counts as almost taken."""
        if self.pace is None or self.steps is None or self.stepped is None:
            return None
        each = self.pace.seconds_per_step
        return max(0.0, (self.steps - self.step) * each - min(now - self.stepped, each))

    def overdue(self, now: float, begun: float, written: float) -> float | None:
        """Returns the seconds since the last step of a running run if they are far too many; else None.

        Args:
            begun: the start of its process, which loads the model before its first step.
            written: the last write of the run.
        """
        if self.pace is None or self.stepped is None or self.step == self.steps or self.stepped < begun:
            return None
        late = now - max(self.stepped, written) > max(_OVERDUE_S, _OVERDUE * self.pace.longest)
        return now - self.stepped if late else None


def measure_progress(lines: Lines, steps: Any, starts: Sequence[float], written: float) -> RunProgress:
    """Returns the progress of a run; `steps` is unchecked, `starts` are the attempts', `written` is the last write."""
    return RunProgress(
        step=lines[-1]["step"] if lines else 0,
        steps=steps if isinstance(steps, int) else None,
        stepped=(lines[-1].get(WRITTEN) or written) if lines else None,
        pace=measure_throughput(lines, starts),
    )


def find_warnings(lines: Lines, logs: Path, limits: Limits) -> Iterator[str]:
    """Yields a sentence per finding of the lines' health, and one for the logs that are not empty, as in healthy runs.

    A finding that begins with one of the first lines may be older.
    """
    for finding in watch(lines, limits=limits).findings:
        old = finding.check.steps > 1 and finding.first < lines[0]["step"] + finding.check.steps
        since = f"since step {finding.first}{' or before' if old and lines[0]['step'] > 1 else ''}"
        during = (
            f"in steps {finding.first} to {finding.last}"
            if finding.last != finding.first
            else f"in step {finding.first}"
        )
        yield f"{since if finding.last is None else during}: {finding.text}"
    if files := sorted(path.name for path in logs.glob("*.log") if path.stat().st_size):
        yield f"printed into {logs}: {shortened(files)}"
