"""The runs that a directory stands for: itself, or those in it."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

from megarl.run.status.submission import prepared

_OF_A_RUN = ("config.yaml", "attempts.jsonl", "metrics.jsonl")
_OF_A_JOB = "slurm/[0-9]*-[0-9]*/times.jsonl"


class NoRunError(ValueError):
    """A path holds no run; the message says what it is."""


def find_runs(path: Path) -> list[Path]:
    """The run of a directory, or, as of a sweep, those in the directories right below it, in their order.

    Raises:
        NoRunError: there is none.
        OSError: the directory cannot be read.
    """
    if not path.exists():
        raise NoRunError(f"{path}: there is no such directory; {_meant(path)}")
    if not path.is_dir():
        raise NoRunError(f"{path}: a file; give the directory of a run, its run.dir")
    if _is_run(path):
        return [path]
    below = [found for found in path.iterdir() if _is_run(found)]
    if not below:
        raise NoRunError(f"{path}: no run is there or in a directory of it; give the run.dir of a run")
    return sorted(below, key=_order)


def _is_run(path: Path) -> bool:
    """What may not be read does not exist."""
    of_a_job = path.glob(_OF_A_JOB)  # which may have ended before it began the run
    return any(os.path.exists(path / name) for name in _OF_A_RUN) or bool(prepared(path)) or any(of_a_job)


def _meant(path: Path) -> str:
    """What to do about a directory that is not there: the one that may have been meant."""
    there = {found.name: found for found in path.parent.iterdir() if found.is_dir()} if path.parent.is_dir() else {}
    near = difflib.get_close_matches(path.name, there, n=1)
    return f"did you mean {there[near[0]]}?" if near else "give the run.dir of a run"


def _order(path: Path) -> list[tuple[bool, int, str]]:
    """By name, and numbers in it by their size: cell-2 is before cell-10."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", path.name)]
