"""Where the Slurm jobs of a run left their files, and what was submitted last. No log is read."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megarl.files import read_json, write_durably
from megarl.run.attempts import Attempt

_FOLDER = "slurm"
_SUBMITTED = "submitted.json"
_JOB_FOLDER = re.compile(r"(\d+)-(\d+)")


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A submission to Slurm.

    Args:
        job: job id; None if only its configuration is known.
        time: seconds since 1970.
    """

    job: str | None
    time: float


def record_submission(folder: Path, job: str) -> None:
    """Writes the id of a submitted job into the folder of its configuration, RUN_DIR/slurm.

    An error is only printed, as the job exists.
    """
    file = folder / _SUBMITTED
    try:
        write_durably(file, json.dumps({"job": job}) + "\n")
    except OSError as error:
        message = f"{file}: {error.strerror}; megarl status will not know of job {job}"
        print(message, file=sys.stderr)


def prepared_configs(run_dir: Path) -> list[Path]:
    """Returns the configurations that were written for a cluster, the newest first."""
    found = (run_dir / _FOLDER).glob("config-*.yaml")
    return sorted(found, key=lambda file: file.stat().st_mtime, reverse=True)


def job_logs(run_dir: Path) -> Path | None:
    """Returns the log directory of the last Slurm job, RUN_DIR/slurm/JOBID-RESTARTS; None without one."""
    last = None
    last_number = (-1, -1)
    for path in (run_dir / _FOLDER).glob("*-*"):
        name = _JOB_FOLDER.fullmatch(path.name)
        if name is None or not path.is_dir():
            continue
        number = (int(name[1]), int(name[2]))
        if number > last_number:
            last = path
            last_number = number
    return last


def pending_submission(run_dir: Path, attempts: Sequence[Attempt], logs: Path | None) -> Submission | None:
    """Returns the last submission if neither an attempt nor a job has started since.

    Args:
        logs: log directory of the last job.
    """
    started = max((attempt.time for attempt in attempts), default=0.0)
    jobs = {attempt.job for attempt in attempts}
    if logs is not None:
        started = max(started, logs.stat().st_mtime)
        jobs.add(logs.name.partition("-")[0])
    submitted = _last_submission(run_dir)
    if submitted is not None and submitted.job in jobs:  # its job has started
        started = max(started, submitted.time)
    elif submitted is not None and submitted.time > started:
        return submitted
    configs = prepared_configs(run_dir)
    if not configs:
        return None
    prepared = configs[0].stat().st_mtime
    if prepared <= started:
        return None
    return Submission(job=None, time=prepared)


def _last_submission(run_dir: Path) -> Submission | None:
    file = run_dir / _FOLDER / _SUBMITTED
    with suppress(OSError, ValueError, KeyError, TypeError):  # missing or unreadable
        return Submission(job=read_json(file)["job"], time=file.stat().st_mtime)
    return None
