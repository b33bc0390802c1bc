"""Reads everything that a run's directory says of the run."""

from __future__ import annotations

import difflib
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megarl.files import read_lines
from megarl.run.attempts import Attempt, read_attempts
from megarl.run.checkpoints import Checkpoints
from megarl.run.sinks import COLUMNS
from megarl.run.status.jobs import Job, Submission, job_of, last_job, noted, prepared
from megarl.run.status.throughput import Progress, progress_of, troubles
from megarl.run.status.verdict import Evidence, State, is_locked, judge

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


_LAST_STEPS = 50
_LINES = ("metrics.jsonl", "updates.jsonl", "evaluations.jsonl", "samples.jsonl")


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """How a run is doing. Times are seconds since 1970.

    Args:
        directory: of the run.
        now: when it was looked at.
        stage: what it does; None where no configuration says it.
        state: see there.
        progress: its steps.
        written: when anything was written last.
        seconds_left: of a run that goes on, if that is known.
        overdue: seconds since the last step of a run that goes on, where they are far too many; else None.
        metrics: of the last step.
        evaluation: the last one.
        troubles: what wants a look, a sentence each.
        saved: the checkpoints of a training run.
        attempts: all, in order.
        submitted: its last submission to a cluster, where nothing has begun since; else None.
        job: of Slurm, that the state is of; None without one.
        newer: the last job of Slurm, where that is another one, and the run is not in it.
        logs: directory with what each process prints.
    """

    directory: str
    now: float
    stage: str | None
    state: State
    progress: Progress
    written: float | None
    seconds_left: float | None
    overdue: float | None
    metrics: Mapping[str, Any]
    evaluation: Mapping[str, Any]
    troubles: Sequence[str]
    saved: Saved | None
    attempts: Sequence[Attempt]
    submitted: Submission | None
    job: Job | None
    newer: Job | None
    logs: str


def read_status(run_dir: Path, now: float | None = None, host: str | None = None) -> RunStatus:
    """Reads it; takes as long for a long run as for a short one.

    Args:
        run_dir: of the run.
        now: seconds since 1970; None is the present.
        host: this machine's name; None asks it.

    Raises:
        OSError: something cannot be read.
    """
    now = time.time() if now is None else now
    config, attempts = _config(run_dir), read_attempts(run_dir / "attempts.jsonl")
    lines, evaluations = (_of_steps(run_dir / name) for name in ("metrics.jsonl", "evaluations.jsonl"))
    written = max(_written(run_dir), default=None)
    finished, locked = (run_dir / "summary.json").exists(), is_locked(run_dir / ".lock")
    job, newer = _jobs(run_dir, attempts, written or 0.0, goes_on=not (finished or locked))
    starts, steps = [attempt.time for attempt in attempts], _mapping(config.get("run")).get("steps")
    progress = progress_of(lines, steps, starts, written or now)
    state = judge(
        Evidence(
            finished=finished,
            locked=locked,
            attempt=attempts[-1] if attempts else None,
            job=job,
            written=written,
            longest=progress.pace and progress.pace.longest,
            host=host or socket.gethostname(),
            now=now,
        )
    )
    stage, runs = config.get("stage"), state.name == "running"
    return RunStatus(
        directory=str(run_dir),
        now=now,
        stage=stage,
        state=state,
        progress=progress,
        written=written,
        seconds_left=progress.seconds_left(now) if runs else None,
        overdue=progress.overdue(now, max(starts, default=0.0), written or 0.0) if runs else None,
        metrics=lines[-1] if lines else {},
        evaluation=evaluations[-1] if evaluations else {},
        troubles=troubles(lines, run_dir / "logs"),
        saved=saved_of(run_dir, progress) if stage in COLUMNS else None,
        attempts=attempts,
        submitted=_submitted(run_dir, starts, [known for known in (job, newer) if known]),
        job=job,
        newer=newer,
        logs=str(run_dir / "logs"),
    )


def _config(run_dir: Path) -> Mapping[str, Any]:
    """What the run was started with, or submitted with; nothing where that cannot be read."""
    for file in (run_dir / "config.yaml", *prepared(run_dir)):
        try:
            return _mapping(yaml.safe_load(file.read_text(encoding="utf-8")))
        except (FileNotFoundError, ValueError, yaml.YAMLError):
            continue
    return {}


def _of_steps(path: Path) -> list[dict[str, Any]]:
    return [line for line in read_lines(path, _LAST_STEPS) if isinstance(line.get("step"), int)]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _written(run_dir: Path) -> Iterator[float]:
    """When the files that grow were written, and checkpoints."""
    checkpoints = run_dir / "checkpoints"
    for path in (*(run_dir / name for name in _LINES), checkpoints, *checkpoints.glob(".step-*.staged/*")):
        try:
            yield path.stat().st_mtime
        except FileNotFoundError:
            continue


def _jobs(
    run_dir: Path, attempts: Sequence[Attempt], written: float, *, goes_on: bool
) -> tuple[Job | None, Job | None]:
    """The job that the state is of, and a later one.

    Args:
        written: when the run was written last, seconds since 1970.
        goes_on: a later job may go on with the run: no process has it now, and it is not finished.
    """
    last = last_job(run_dir, _prepared(run_dir))
    if not attempts:
        return last, None
    attempt = attempts[-1]
    own = job_of(run_dir, attempt)
    if last is None or not last.follows(attempt):
        return own, None
    return (last, None) if goes_on and last.outlasts(attempt, written) else (own, last)


def _submitted(run_dir: Path, starts: Sequence[float], jobs: Sequence[Job]) -> Submission | None:
    """The last submission, or the configuration that was written for one, unless an attempt or a job began since."""
    last, given, when = max([*starts, *(job.began for job in jobs)], default=0.0), noted(run_dir), _prepared(run_dir)
    if given is not None and given.time > last and given.job not in [job.id for job in jobs]:
        return given
    return Submission(job=None, time=when) if when > last else None


def _prepared(run_dir: Path) -> float:
    """When its configuration was written for a cluster last, seconds since 1970."""
    return max((file.stat().st_mtime for file in prepared(run_dir)), default=0.0)
