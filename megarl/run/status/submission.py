"""The last submission of a run, while nothing of it has begun: submitted.json beside its configuration."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from megarl.files import write_durably

_FOLDERS = ("slurm", "ray")
_NAME = "submitted.json"


@dataclass(frozen=True, kw_only=True)
class Submission:
    """What was prepared for a cluster.

    Args:
        job: its number or name; None where the configuration was written, and no job is known of.
        time: seconds since 1970.
    """

    job: str | None
    time: float


def note(folder: Path, job: str) -> None:
    """Notes the job of a run that was just submitted. Where that cannot be written, the job waits all the same.

    Args:
        folder: of the run's configuration, as RUN_DIR/slurm.
        job: its number or name.
    """
    try:
        write_durably(folder / _NAME, json.dumps({"job": job}) + "\n")
    except OSError as error:
        print(f"{folder / _NAME}: {error.strerror}; megarl status will not know of job {job}", file=sys.stderr)


def noted(run_dir: Path) -> Submission | None:
    """The last job that was noted; the file's own time is that of the submission."""
    found: list[Submission] = []
    for file in (run_dir / folder / _NAME for folder in _FOLDERS):
        try:
            found.append(Submission(job=json.loads(file.read_text())["job"], time=file.stat().st_mtime))
        except (OSError, ValueError, KeyError, TypeError):  # missing, or not to be read
            continue
    return max(found, key=lambda submission: submission.time, default=None)


def prepared(run_dir: Path) -> list[Path]:
    """The configurations that were written for a cluster, the last one first; a run has them before it begins."""
    found = (file for folder in _FOLDERS for file in (run_dir / folder).glob("config-*.yaml"))
    return sorted(found, key=lambda file: file.stat().st_mtime, reverse=True)
