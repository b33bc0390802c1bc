"""Reads the status of a run from its directory."""

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

from megarl.errors import UsageError
from megarl.files import read_lines
from megarl.run.attempts import Attempt, read_attempts
from megarl.run.checkpoints import Checkpoints
from megarl.run.health import WINDOW, health_limits
from megarl.run.paths import RunPaths, is_locked, read_config
from megarl.run.status.jobs import JobStatus, Submission, find_jobs, prepared_configs
from megarl.run.status.run_state import Evidence, RunState, determine_state
from megarl.run.status.throughput import RunProgress, Waits, find_warnings, measure_progress, measure_waits

_JOB_FILES = "slurm/[0-9]*-[0-9]*/times.jsonl"


class StatusError(UsageError):
    """A status cannot be shown; the message is for the user."""


def find_runs(path: Path) -> list[Path]:
    """Returns the run in a directory or, as for a sweep, the runs in the directories right below it, in order.

    Raises:
        StatusError: there is none.
        OSError: the directory cannot be read.
    """
    if not path.exists():
        raise StatusError(f"{path}: there is no such directory; {_suggestion(path)}")
    if not path.is_dir():
        raise StatusError(f"{path}: a file; give the directory of a run, its run.dir")
    if _is_run(path):
        return [path]
    below = [found for found in path.iterdir() if _is_run(found)]
    if not below:
        raise StatusError(f"{path}: no run is there or in a directory of it; give the run.dir of a run")
    return sorted(below, key=_order)


def _is_run(path: Path) -> bool:
    """Whether there are files of a run, or of a job, which may have ended before it started the run."""
    run = RunPaths(path)
    started = any(os.path.exists(file) for file in (run.config, run.attempts, run.metrics))  # False if not readable
    return started or bool(prepared_configs(path)) or any(path.glob(_JOB_FILES))


def _suggestion(path: Path) -> str:
    there = {found.name: found for found in path.parent.iterdir() if found.is_dir()} if path.parent.is_dir() else {}
    near = difflib.get_close_matches(path.name, there, n=1)
    return f"did you mean {there[near[0]]}?" if near else "give the run.dir of a run"


def _order(path: Path) -> list[tuple[bool, int, str]]:
    """Sorts by name, numbers in it by value: cell-2 precedes cell-10."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", path.name)]


@dataclass(frozen=True, kw_only=True)
class CheckpointState:
    """The checkpoint that a run would resume from.

    Args:
        step: of the last checkpoint; 0 without one.
        others: steps of the other checkpoints.
        writing: step of an unfinished checkpoint, which is being written or whose writer was killed.
        again: steps that a resume would repeat.
        seconds: that they take, if known.
    """

    step: int
    others: tuple[int, ...]
    writing: int | None
    again: int
    seconds: float | None


def checkpoint_state(checkpoints: Checkpoints, progress: RunProgress) -> CheckpointState:
    *others, last = checkpoints.steps() or [0]
    again = max(0, progress.step - last)
    pace = progress.pace
    seconds = None if pace is None else again * pace.seconds_per_step
    return CheckpointState(
        step=last,
        others=tuple(others),
        writing=checkpoints.staged_step(),
        again=again,
        seconds=seconds,
    )


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The status of a run. Times are seconds since 1970.

    Args:
        now: time of reading.
        stage: None if no configuration states it.
        written: the last write of anything.
        seconds_left: of a running run, if known.
        overdue: seconds since the last step of a running run if they are far too many; else None.
        metrics: of the last step.
        waits: of a run whose engines sample ahead.
        evaluation: the last one.
        troubles: warnings about the last steps, a sentence each.
        verdict: whether a finished run learned; empty if it is not known.
        saved: of a training run.
        submitted: the last submission to a cluster, if nothing has started since.
        job: the Slurm job that the state refers to, if any.
        newer: a later Slurm job that does not have the run, if any.
        logs: directory with the output of each process.
    """

    directory: str
    now: float
    stage: str | None
    state: RunState
    progress: RunProgress
    written: float | None
    seconds_left: float | None
    overdue: float | None
    metrics: Mapping[str, Any]
    waits: Waits | None
    evaluation: Mapping[str, Any]
    troubles: Sequence[str]
    verdict: str
    saved: CheckpointState | None
    attempts: Sequence[Attempt]
    submitted: Submission | None
    job: JobStatus | None
    newer: JobStatus | None
    logs: str


def read_status(run_dir: Path, now: float | None = None, host: str | None = None) -> RunStatus:
    """Reads the status of a run, in a time that does not depend on its length; raises OSError on an unreadable file.

    Args:
        now: seconds since 1970; None is the present.
        host: this machine; None asks the system.
    """
    now = time.time() if now is None else now
    run = RunPaths(run_dir)
    config = _config(run)
    attempts = read_attempts(run.attempts)
    lines = _last_steps(run.metrics)
    evaluations = _last_steps(run.evaluations)
    written = max(_write_times(run), default=None)
    locked = is_locked(run.lock)
    resumable = not (run.finished or locked)
    job, newer, submitted = find_jobs(run_dir, attempts, written or 0.0, resumable=resumable)
    starts = [attempt.time for attempt in attempts]
    section = config.get("run")
    steps = section.get("steps") if isinstance(section, Mapping) else None
    progress = measure_progress(lines, steps, starts, written or now)
    state = determine_state(
        Evidence(
            finished=run.finished,
            locked=locked,
            attempt=attempts[-1] if attempts else None,
            job=job,
            written=written,
            longest=progress.pace and progress.pace.longest,
            host=host or socket.gethostname(),
            now=now,
        )
    )
    stage = config.get("stage")
    running = state.name == "running"
    return RunStatus(
        directory=str(run_dir),
        now=now,
        stage=stage,
        state=state,
        progress=progress,
        written=written,
        seconds_left=progress.seconds_left(now) if running else None,
        overdue=progress.overdue(now, max(starts, default=0.0), written or 0.0) if running else None,
        metrics=lines[-1] if lines else {},
        waits=measure_waits(lines),
        evaluation=evaluations[-1] if evaluations else {},
        troubles=list(find_warnings(lines, run.logs, health_limits(config))),
        verdict=str(read_config(run.summary).get("verdict", "")),
        saved=checkpoint_state(Checkpoints(run.checkpoint_dir, keep=1), progress) if "checkpoint" in config else None,
        attempts=attempts,
        submitted=submitted,
        job=job,
        newer=newer,
        logs=str(run.logs),
    )


def _config(run: RunPaths) -> Mapping[str, Any]:
    """Returns the configuration of the start, or else of the submission."""
    for file in (run.config, *prepared_configs(run.path)):
        if fields := read_config(file):
            return fields
    return {}


def _last_steps(path: Path) -> list[dict[str, Any]]:
    return [line for line in read_lines(path, WINDOW) if isinstance(line.get("step"), int)]


def _write_times(run: RunPaths) -> Iterator[float]:
    """Yields the modification times of the files that grow, and of checkpoints."""
    for path in (*run.line_files, run.checkpoint_dir, *run.checkpoint_dir.glob(".step-*.staged/*")):
        try:
            yield path.stat().st_mtime
        except FileNotFoundError:
            continue
