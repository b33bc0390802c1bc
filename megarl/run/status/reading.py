"""Reads the status of a run from its directory."""

from __future__ import annotations

import difflib
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.errors import UsageError
from megarl.files import read_lines
from megarl.run.attempts import Attempt, read_attempts
from megarl.run.checkpoints import Checkpoints, reasons_to_keep
from megarl.run.health import WINDOW, health_limits
from megarl.run.paths import RunPaths, is_locked, read_config
from megarl.run.status.jobs import Submission, job_logs, pending_submission, prepared_configs
from megarl.run.status.run_state import Evidence, RunState, determine_state
from megarl.run.status.throughput import RunProgress, find_warnings, measure_progress


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
    return started or bool(prepared_configs(path)) or job_logs(path) is not None


def _suggestion(path: Path) -> str:
    there = {found.name: found for found in path.parent.iterdir() if found.is_dir()} if path.parent.is_dir() else {}
    near = difflib.get_close_matches(path.name, there, n=1)
    return f"did you mean {there[near[0]]}?" if near else "give the run.dir of a run"


def _order(path: Path) -> list[tuple[bool, int, str]]:
    """Sorts by name, numbers in it by value: cell-2 precedes cell-10."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", path.name)]


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
    """A committed checkpoint.

    Args:
        nbytes: size of its files.
        kept: why it stays, such as "newest".
    """

    step: int
    nbytes: int
    kept: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class CheckpointState:
    """The checkpoint that a run would resume from.

    Args:
        step: of the last checkpoint; 0 without one.
        writing: step of an unfinished checkpoint, which is being written or whose writer was killed.
        again: steps that a resume would repeat.
        seconds: duration of these steps, if known.
        checkpoints: all committed ones, in order.
    """

    step: int
    writing: int | None
    again: int
    seconds: float | None
    checkpoints: Sequence[SavedCheckpoint]


def checkpoint_state(run: RunPaths, config: Mapping[str, Any], progress: RunProgress) -> CheckpointState:
    """Returns what a resume would start from, and the checkpoints with their sizes."""
    store = Checkpoints(run.checkpoint_dir, keep=1)
    steps = store.steps()
    last = max(steps, default=0)
    again = max(0, progress.step - last)
    seconds = None
    if progress.pace is not None:
        seconds = again * progress.pace.seconds_per_step
    reasons = _reasons_to_keep(run, config, steps)
    saved: list[SavedCheckpoint] = []
    for step in steps:
        size = _checkpoint_size(run.checkpoint_dir / f"step-{step}")
        saved.append(SavedCheckpoint(step=step, nbytes=size, kept=reasons.get(step, ())))
    return CheckpointState(
        step=last,
        writing=store.staged_step(),
        again=again,
        seconds=seconds,
        checkpoints=saved,
    )


@dataclass(frozen=True, kw_only=True)
class _BestCheckpoint:
    metric: str
    mode: str


@dataclass(frozen=True, kw_only=True)
class _KeepSettings:
    """The fields of `checkpoint` that say what stays; the configuration's schema is not loaded here."""

    keep: int
    keep_every: int | None = None
    best: _BestCheckpoint | None = None


def _reasons_to_keep(run: RunPaths, config: Mapping[str, Any], steps: Sequence[int]) -> Mapping[int, Sequence[str]]:
    """Returns why each checkpoint stays; empty if the configuration does not say it."""
    try:
        fields = config["checkpoint"]
        best = fields.get("best")
        if best is not None:
            best = _BestCheckpoint(metric=best["metric"], mode=best["mode"])
        settings = _KeepSettings(keep=fields["keep"], keep_every=fields.get("keep_every"), best=best)
        return reasons_to_keep(settings, steps, run.evaluations)
    except (KeyError, TypeError, AttributeError):  # a field is missing or of another type
        return {}


def _checkpoint_size(directory: Path) -> int:
    """Returns the bytes of a checkpoint's files; files that the run removes meanwhile do not count."""
    total = 0
    for path in directory.rglob("*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total


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
        evaluation: the last one.
        troubles: warnings about the last steps, a sentence each.
        verdict: whether a finished run learned; empty if it is not known.
        saved: of a training run.
        submitted: the last submission to a cluster, if nothing has started since.
        logs: directory with the output of each process.
        job_logs: directory with the logs of the last Slurm job, if any.
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
    evaluation: Mapping[str, Any]
    troubles: Sequence[str]
    verdict: str
    saved: CheckpointState | None
    attempts: Sequence[Attempt]
    submitted: Submission | None
    logs: str
    job_logs: str | None


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
    slurm = job_logs(run_dir)
    starts = [attempt.time for attempt in attempts]
    section = config.get("run")
    steps = section.get("steps") if isinstance(section, Mapping) else None
    progress = measure_progress(lines, steps, starts, written or now)
    state = determine_state(
        Evidence(
            finished=run.finished,
            locked=locked,
            attempt=attempts[-1] if attempts else None,
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
        evaluation=evaluations[-1] if evaluations else {},
        troubles=list(find_warnings(lines, run.logs, health_limits(config))),
        verdict=str(read_config(run.summary).get("verdict", "")),
        saved=checkpoint_state(run, config, progress) if "checkpoint" in config else None,
        attempts=attempts,
        submitted=pending_submission(run_dir, attempts, slurm),
        logs=str(run.logs),
        job_logs=None if slurm is None else str(slurm),
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
