"""How far a run is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.run.sinks import WRITTEN
from megarl.run.status.pace import Pace, pace_of

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
