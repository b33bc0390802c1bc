"""The files of a run's directory, the lock of its process, and the reader of its configuration."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, cast

import yaml

from megarl.files import open_file

JOBS = "slurm"
"""The folder of run.dir with the files of Slurm jobs, and a folder with the logs of each."""
JOB_END = "end.json"
"""The file in a job's folder that says why the job ended."""
_LARGEST_CONFIG = 1 << 20
_YAML = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the former is faster, and not in every build
# to get the lock: `is_locked` holds it for an instant
_TRIES = 3
_PAUSE_S = 0.05


class RunPaths:
    """The files of a run, below run.dir."""

    def __init__(self, path: str | Path) -> None:
        self.path = path = Path(path)
        self.config = path / "config.yaml"  # resolved
        self.metrics = path / "metrics.jsonl"  # a JSON object per step, as are the lines of
        self.updates = path / "updates.jsonl"  # each optimizer step,
        self.evaluations = path / "evaluations.jsonl"  # each evaluation,
        self.samples = path / "samples.jsonl"  # each sample that is kept for reading,
        self.prompt_scores = path / "prompt_scores.jsonl"  # each prompt of each evaluation,
        self.attempts = path / "attempts.jsonl"  # each start and each end of its processes
        self.trace = path / "trace.json"  # what each process did and when, in all attempts; when it was full it became
        self.earlier_trace = path / "trace.1.json"
        self.profile = path / "profile"  # traces and kernels of the steps that `profile` names
        self.tensorboard = path / "tensorboard"
        self.skipped = path / "skipped"  # the batches of the last steps in a row with skipped optimizer steps
        self.reference = path / "reference"  # log-probabilities that are computed once, in a folder for each model
        self.left_out = path / "left_out.jsonl"  # rows of the data that are not used
        self.checkpoint_dir = path / "checkpoints"
        self.export = path / "export"  # the trained model as a Hugging Face directory
        self.logs = path / "logs"  # the output of each process
        self.summary = path / "summary.json"  # written last: it exists if the run is finished
        self.lock = path / ".lock"

    @property
    def finished(self) -> bool:
        return self.summary.exists()

    @property
    def line_files(self) -> tuple[Path, ...]:
        """The files with lines of steps."""
        return self.metrics, self.updates, self.evaluations, self.samples, self.prompt_scores


def ema_export(export: Path) -> Path:
    """Returns the directory of the EMA weights that belong to an exported actor."""
    return export.with_name(f"{export.name}-ema")


def read_config(path: Path) -> Mapping[str, Any]:
    """Returns the fields of a run's configuration; none if the file is missing, or is nothing that a run writes.

    Raises OSError where it cannot be read, or is no regular file.
    """
    try:
        with open_file(path) as file:
            text = file.read(_LARGEST_CONFIG + 1)
        # A few lines of aliases can stand for more than any memory holds.
        has_aliases = any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=_YAML))
        if len(text) > _LARGEST_CONFIG or has_aliases:
            return {}
        fields = _YAML(text).get_single_data()
    except (FileNotFoundError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return fields if isinstance(fields, Mapping) else {}


def field_at(fields: Any, path: str, missing: Any = None) -> Any:
    """Returns the entry of nested mappings at a dotted path."""
    for key in path.split("."):
        if not isinstance(fields, Mapping):
            return missing
        fields = cast(Mapping[str, Any], fields).get(key, missing)
    return fields


def acquire_lock(lock: IO[str]) -> None:
    """Locks an open file; closing it, or the end of the process, releases the lock.

    Raises:
        BlockingIOError: another process holds the lock.
        OSError: the file system has no locks.
    """
    for tries_left in reversed(range(_TRIES)):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if not tries_left:
                raise
            time.sleep(_PAUSE_S)


def is_locked(path: Path) -> bool | None:
    """Whether a process holds the lock of a run's directory; None if that cannot be determined.

    A shared file system may show the lock only to the machine that holds it: True is certain, False
    holds for processes of this machine. The call holds a shared lock for an instant.
    """
    try:
        with open_file(path) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError:  # not readable, or a file system without locks
        return None
    return False
