"""Reads the status of a run from its directory."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from megarl.errors import UsageError
from megarl.files import read_lines
from megarl.run.attempts import Attempt, AttemptEnd, read_attempts
from megarl.run.checkpoints import Checkpoints
from megarl.run.health import (
    WINDOW,
    HealthFinding,
    HealthMonitor,
    Limits,
    Lines,
    health_limits,
    metric_values,
    shortened,
)
from megarl.run.paths import JOB_END, JOBS, RunPaths, field_at, is_locked, read_config
from megarl.run.sinks import WRITTEN

StateName = Literal[
    "finished", "profiled", "running", "preempted", "interrupted", "failed", "killed", "silent", "waiting"
]
_SILENT_S = 1800.0  # loading a model may take that long


def find_runs(path: Path) -> list[Path]:
    """Returns the run in a directory, or the runs in the directories right below it, in order.

    Raises:
        UsageError: there is none.
        OSError: the directory cannot be read.
    """
    if path.is_dir() and not _is_run(path):
        below = [found for found in path.iterdir() if _is_run(found)]
        if below:
            return sorted(below)
    require_run(path)
    return [path]


def require_run(path: Path) -> None:
    """Raises UsageError if no run is in a directory."""
    if not path.exists():
        raise UsageError(f"{path}: there is no such directory; give the run.dir of a run")
    if not path.is_dir():
        raise UsageError(f"{path}: a file; give the directory of a run, its run.dir")
    if not _is_run(path):
        raise UsageError(f"{path}: no run is there; give the run.dir of a run")


def _is_run(path: Path) -> bool:
    """Whether there are files of a run, or of a job, which may have ended before it started the run."""
    run = RunPaths(path)
    files = (run.config, run.attempts, run.metrics, path / JOBS)
    return any(os.path.exists(file) for file in files)  # False if not readable


@dataclass(frozen=True)
class RunState:
    """The state of a run.

    Args:
        message: error that ended it, if any.
        since: time of its end, seconds since 1970; None if it continues or that is unknown.
    """

    name: StateName
    message: str = ""
    since: float | None = None


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
        steps: steps of the whole run; None of a standalone evaluation.
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


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
    """A committed checkpoint: its step and the size of its files."""

    step: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The status of a run. Times are seconds since 1970.

    Args:
        now: time of reading.
        written: time of the last write of anything.
        seconds_left: remaining seconds of a running run, if known.
        metrics: metrics of the last step.
        troubles: warnings about the last steps, a sentence each.
        verdict: whether a finished run learned; empty if unknown.
        unfinished: step of a checkpoint that is being written, or whose writer was killed.
        logs: directory with the output of each process.
        job_logs: directory with the logs of the Slurm job, if any.
    """

    directory: str
    now: float
    stage: str | None
    state: RunState
    progress: Progress
    written: float | None
    seconds_left: float | None
    metrics: Mapping[str, Any]
    troubles: Sequence[str]
    verdict: str
    checkpoints: Sequence[SavedCheckpoint]
    unfinished: int | None
    attempts: Sequence[Attempt]
    logs: str
    job_logs: str | None


def read_status(run_dir: Path, now: float | None = None, host: str | None = None) -> RunStatus:
    """Reads the status of a run, in a time that does not depend on its length; raises OSError on an unreadable file.

    `now` are seconds since 1970, `host` is the name of this machine.
    """
    if now is None:
        now = time.time()
    run = RunPaths(run_dir)
    config = read_config(run.config)
    attempts = read_attempts(run.attempts)
    lines = [line for line in read_lines(run.metrics, WINDOW) if isinstance(line.get("step"), int)]
    written = max(_write_times(run), default=None)
    state = _state(run, attempts, written, host or socket.gethostname(), now)
    progress = _progress(config, lines, attempts, written or now)
    store = Checkpoints(run.checkpoint_dir)
    return RunStatus(
        directory=str(run_dir),
        now=now,
        stage=config.get("stage"),
        state=state,
        progress=progress,
        written=written,
        seconds_left=progress.seconds_left(now) if state.name == "running" else None,
        metrics=lines[-1] if lines else {},
        troubles=list(find_warnings(lines, run.logs, health_limits(config))),
        verdict=str(read_config(run.summary).get("verdict", "")),
        checkpoints=[SavedCheckpoint(step=step, nbytes=_size(store.path(step))) for step in store.steps()],
        unfinished=store.staged_step(),
        attempts=attempts,
        logs=str(run.logs),
        job_logs=_job_logs(run_dir, attempts),
    )


def _state(run: RunPaths, attempts: Sequence[Attempt], written: float | None, host: str, now: float) -> RunState:
    """Returns the state by the lock and the last attempt or, for a process that is not visible, by the last write."""
    locked = is_locked(run.lock)
    if locked:
        return RunState("running")
    active = written or 0.0
    if attempts:
        attempt = attempts[-1]
        end = attempt.end
        if end is not None:
            return _ended(end, finished=run.finished)
        if attempt.host == host and locked is False and not run.finished:
            message = f"process {attempt.pid} on {host} wrote no reason: it was killed, or the machine went down"
            job_logs = _job_logs(run.path, attempts)
            if job_logs is not None:  # Ray ends the driver whose raylet ends (ray 2.60)
                reason = read_config(Path(job_logs, JOB_END)).get("reason")
                message = f"{message}; its job ended: {reason}" if reason else message
            return RunState("killed", message, written)
        active = max(active, attempt.time)
    if run.finished:
        return RunState("finished")
    if not active:
        return RunState("waiting")
    if now - active > _SILENT_S:
        return RunState("silent")
    return RunState("running")


def _ended(end: AttemptEnd, *, finished: bool) -> RunState:
    if finished or end.reason == "finished":
        return RunState("finished", since=end.time)
    name: StateName = "failed"
    if end.reason in ("profiled", "preempted", "interrupted"):
        name = end.reason
    return RunState(name, end.message, end.time)


def _progress(
    config: Mapping[str, Any], lines: Sequence[Mapping[str, Any]], attempts: Sequence[Attempt], written: float
) -> Progress:
    steps = field_at(config, "run.steps")
    if not isinstance(steps, int):
        steps = None
    if not lines:
        return Progress(step=0, steps=steps, stepped=None, pace=None)
    last = lines[-1]
    pace = measure_pace(lines, [attempt.time for attempt in attempts])
    return Progress(step=last["step"], steps=steps, stepped=last.get(WRITTEN) or written, pace=pace)


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
    for finding in HealthMonitor(lines, limits=limits).findings:
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


def _size(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        with suppress(FileNotFoundError):  # the run may remove it meanwhile
            if path.is_file():
                total += path.stat().st_size
    return total


def _job_logs(run_dir: Path, attempts: Sequence[Attempt]) -> str | None:
    """Returns the directory of the last attempt's Slurm job, or that of all jobs while no attempt has one."""
    folder = run_dir / JOBS
    if attempts and attempts[-1].job is not None:
        folder /= f"{attempts[-1].job}-{attempts[-1].restart}"
    return str(folder) if folder.is_dir() else None


def _write_times(run: RunPaths) -> Iterator[float]:
    """Yields the modification times of the files that grow, and of checkpoints."""
    for path in (*run.line_files, run.checkpoint_dir, *run.checkpoint_dir.glob(".step-*.staged/*")):
        with suppress(FileNotFoundError):
            yield path.stat().st_mtime
