"""What a run would go on from, and what it would take again."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from megarl.checkpoint import Checkpoints
from megarl.run.status.progress import Progress

_STAGED = re.compile(r"\.step-(\d+)\.staged")


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What a run would go on from.

    Args:
        step: of the last checkpoint; 0 where there is none: the run would begin again.
        writing: step of the one that is being written, or was when its writer was killed.
        again: steps that would be taken again.
        seconds: that they take, if that is known.
    """

    step: int
    writing: int | None
    again: int
    seconds: float | None


def saved_of(run_dir: Path, progress: Progress) -> Saved:
    """What a run would go on from.

    Args:
        run_dir: of the run.
        progress: of the run.
    """
    directory = run_dir / "checkpoints"
    last = max(Checkpoints(directory, keep=1).steps(), default=0)
    staged = (_STAGED.fullmatch(path.name) for path in directory.glob(".step-*"))
    again, pace = max(0, progress.step - last), progress.pace
    return Saved(
        step=last,
        writing=max((int(match[1]) for match in staged if match), default=None),
        again=again,
        seconds=None if pace is None else again * pace.seconds_per_step,
    )
