"""Everything that the directory of a run says of it now."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megarl.obs.attempts import Attempt, read_attempts
from megarl.obs.columns import COLUMNS
from megarl.obs.lines import read_lines
from megarl.status.find import submitted
from megarl.status.health import troubles
from megarl.status.lock import is_locked
from megarl.status.progress import Progress, progress_of
from megarl.status.saved import Saved, saved_of
from megarl.status.slurm import Job, last_job, last_output
from megarl.status.state import Evidence, State, judge

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
        submitted: when it was last prepared for a cluster, where nothing has begun since; else None.
        job: the last one of Slurm.
        output: file with what the last job of Slurm printed.
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
    submitted: float | None
    job: Job | None
    output: str | None
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
    config, attempts, output = _config(run_dir), read_attempts(run_dir / "attempts.jsonl"), last_output(run_dir)
    job = last_job(run_dir, output)
    lines, evaluations = (_of_steps(run_dir / name) for name in ("metrics.jsonl", "evaluations.jsonl"))
    written = max(_written(run_dir), default=None)
    starts, steps = [attempt.time for attempt in attempts], _mapping(config.get("run")).get("steps")
    progress = progress_of(lines, steps, starts, written or now)
    state = judge(
        Evidence(
            finished=(run_dir / "summary.json").exists(),
            locked=is_locked(run_dir / ".lock"),
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
        submitted=_submitted(run_dir, attempts, job),
        job=job,
        output=output,
        logs=str(run_dir / "logs"),
    )


def _config(run_dir: Path) -> Mapping[str, Any]:
    """What the run was started with, or submitted with; nothing where that cannot be read."""
    for file in (run_dir / "config.yaml", *submitted(run_dir)):
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


def _submitted(run_dir: Path, attempts: Sequence[Attempt], job: Job | None) -> float | None:
    """When the configuration was written for a cluster, unless a job or an attempt has begun since."""
    when = max((file.stat().st_mtime for file in submitted(run_dir)), default=0.0)
    begun = [*(attempt.time for attempt in attempts), *([] if job is None else [job.began])]
    return when if when > max(begun, default=0.0) else None
