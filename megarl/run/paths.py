"""The files of a run's directory, the lock that its process holds, and the reader of its configuration."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import yaml

_TRIES, _PAUSE_S = 3, 0.05
"""To get the lock: `is_locked` holds it for an instant."""


class RunPaths:
    """The files of a run.

    Args:
        path: the run's directory, run.dir.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path = Path(path)
        self.config = path / "config.yaml"  # resolved
        self.metrics = path / "metrics.jsonl"  # a JSON object per step, as are the lines of
        self.updates = path / "updates.jsonl"  # each optimizer step,
        self.evaluations = path / "evaluations.jsonl"  # each evaluation,
        self.samples = path / "samples.jsonl"  # each sample that is kept for reading,
        self.attempts = path / "attempts.jsonl"  # each start and each end of a process that runs the run
        self.tensorboard = path / "tensorboard"
        self.left_out = path / "left_out.jsonl"  # rows of the data that are not used
        self.checkpoint_dir = path / "checkpoints"
        self.export = path / "export"  # the trained model as a Hugging Face directory
        self.logs = path / "logs"  # the output of each process
        self.summary = path / "summary.json"  # written last: its presence means that the run is finished
        self.lock = path / ".lock"

    @property
    def finished(self) -> bool:
        return self.summary.exists()

    @property
    def line_files(self) -> tuple[Path, ...]:
        """The files with lines of steps."""
        return self.metrics, self.updates, self.evaluations, self.samples


def ema_export(export: Path) -> Path:
    """Returns the directory of the exported moving average that belongs to an exported actor."""
    return export.with_name(f"{export.name}-ema")


def read_config(path: Path) -> Mapping[str, Any]:
    """Returns the fields of a configuration file; none when it is missing or not readable as YAML."""
    try:
        fields = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError, yaml.YAMLError):
        return {}
    return fields if isinstance(fields, Mapping) else {}


def acquire_lock(lock: IO[str]) -> None:
    """Locks an open file; closing it, or the end of the process, releases the lock. An error closes it.

    Raises:
        BlockingIOError: another process holds the lock.
        OSError: the file system has no locks.
    """
    for tries_left in reversed(range(_TRIES)):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if not isinstance(error, BlockingIOError) or not tries_left:
                lock.close()
                raise
            time.sleep(_PAUSE_S)


def is_locked(path: Path) -> bool | None:
    """Whether a process holds the lock of a run's directory; None when that cannot be determined.

    On a shared file system, the lock may be visible only on the machine that holds it: True is certain, False holds for
    processes of this machine. The call holds a shared lock for an instant.
    """
    try:
        with path.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError:  # not readable, or a file system without locks
        return None
    return False
