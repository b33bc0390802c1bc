"""How far a run is, how fast it goes, and what looks wrong with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
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


_OVERDUE, _OVERDUE_S = 3.0, 60.0
"""A step is overdue when it takes as many times the longest of the last ones, and as many seconds."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The steps that a run has told of.

    Args:
        step: the last one; 0 where there is none.
        steps: that are to be taken; None where no configuration says it, as of an evaluation by itself.
        stepped: when the last one was told, seconds since 1970; None where there is none.
        pace: of the last ones; None where it is not known yet.
    """

    step: int
    steps: int | None
    stepped: float | None
    pace: Pace | None

    def seconds_left(self, now: float) -> float | None:
        """Of a run that goes on, if that is known; a step that is overdue is as good as taken."""
        if self.pace is None or self.steps is None or self.stepped is None:
            return None
        each = self.pace.seconds_per_step
        return max(0.0, (self.steps - self.step) * each - min(now - self.stepped, each))

    def overdue(self, now: float, begun: float, written: float) -> float | None:
        """Seconds since the last step of a run that goes on, where they are far too many; else None.

        Args:
            now: seconds since 1970.
            begun: when its process began, which may not have taken a step yet: it loads its model.
            written: when the run has last written anything.
        """
        if self.pace is None or self.stepped is None or self.step == self.steps or self.stepped < begun:
            return None
        late = now - max(self.stepped, written) > max(_OVERDUE_S, _OVERDUE * self.pace.longest)
        return now - self.stepped if late else None


def progress_of(lines: Sequence[Mapping[str, Any]], steps: Any, starts: Sequence[float], written: float) -> Progress:
    """How far a run is.

    Args:
        lines: of metrics.jsonl, the last ones.
        steps: that its configuration asks for, whatever that may be.
        starts: of the attempts.
        written: when the file was, seconds since 1970.
    """
    return Progress(
        step=lines[-1]["step"] if lines else 0,
        steps=steps if isinstance(steps, int) else None,
        stepped=(lines[-1].get(WRITTEN) or written) if lines else None,
        pace=pace_of(lines, starts),
    )


_SKIPPED = "/skipped"
_UNSCORED, _SAMPLED = "rewards/unscored", "rollout/samples"
_SHOWN = 4

Lines = Sequence[Mapping[str, Any]]


def troubles(lines: Lines, logs: Path) -> list[str]:
    """A sentence for each thing that wants a look.

    Args:
        lines: of metrics.jsonl, the last ones.
        logs: directory with what the run's processes print.
    """
    return [*_not_finite(lines), *_skipped(lines), *_unscored(lines), *_printed(logs)]


def _not_finite(lines: Lines) -> Iterator[str]:
    names = [name for name, value in lines[-1].items() if value is None] if lines else []
    if names:
        yield f"step {lines[-1]['step']}: not a finite number: {_few(names)}"


def _skipped(lines: Lines) -> Iterator[str]:
    """Optimizer steps that were not taken, as their gradients were not finite."""
    roles = dict.fromkeys(name for line in lines for name in line if name.endswith(_SKIPPED))
    for name in roles:
        steps = [line["step"] for line in lines if line.get(name)]
        if steps:
            part = f"{len(steps)} of the last {len(lines)} steps, last in step {steps[-1]}"
            yield f"{name.removesuffix(_SKIPPED)}: gradients that were not finite, and were skipped, in {part}"


def _unscored(lines: Lines) -> Iterator[str]:
    unscored = sum(line.get(_UNSCORED) or 0 for line in lines)
    if unscored:
        sampled = sum(line.get(_SAMPLED) or 0 for line in lines)
        yield f"{unscored} of {sampled} responses of the last {len(lines)} steps have no score"


def _printed(logs: Path) -> Iterator[str]:
    """Logs of processes, which are empty as long as nothing is wrong."""
    files = sorted(path for path in logs.glob("*.log") if path.stat().st_size)
    if files:
        yield f"printed into {logs}: {_few([path.name for path in files])}"


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
