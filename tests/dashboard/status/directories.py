"""Directories of runs and jobs, written by hand."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NOW = 1_700_000_000.0
"""Tuesday, 14 November 2023, 22:13:20 UTC."""
MINUTE = 60.0


class MadeRun:
    """A PPO run of 100 steps in a directory, which is made; all of its records are from before NOW."""

    def __init__(self, path: Path, stage: str = "ppo") -> None:
        self.path = path
        path.mkdir(parents=True)
        (path / "config.yaml").write_text(f"stage: {stage}\nrun: {{dir: {path}, steps: 100}}\n")
        (path / ".lock").touch()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the lock of the run, as its process does."""
        with (self.path / ".lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def start(self, number: int, ago: float, step: int = 0, **fields: Any) -> None:
        """An attempt that began so many seconds ago."""
        given = {"host": "n1", "pid": 77, "job": None, "restart": 0, **fields}
        started = {"number": number, "time": NOW - ago, "step": step, **given}
        self._line("attempts.jsonl", {"event": "start", **started}, ago)

    def end(self, number: int, ago: float, step: int, reason: str, message: str = "") -> None:
        ended = {"number": number, "time": NOW - ago, "step": step, "reason": reason, "message": message}
        self._line("attempts.jsonl", {"event": "end", **ended}, ago)

    def step(self, step: int, ago: float, **metrics: float | None) -> None:
        """A step that was written so many seconds ago; ``__`` in a metric's name is the slash."""
        named = {name.replace("__", "/"): value for name, value in metrics.items()}
        self._line("metrics.jsonl", {"step": step, **named, "time/written": NOW - ago}, ago)

    def steps(self, last: int, ago: float, apart: float, first: int = 1) -> None:
        """Steps at even intervals, the last one so many seconds ago."""
        for step in range(first, last + 1):
            self.step(step, ago + (last - step) * apart, objective__score=step / 100, objective__kl=0.5)

    def evaluation(self, step: int, ago: float, **metrics: float) -> None:
        named = {f"eval/{name}": value for name, value in metrics.items()}
        self._line("evaluations.jsonl", {"step": step, **named, "time/written": NOW - ago}, ago)

    def checkpoint(self, step: int, nbytes: int) -> None:
        directory = self.path / "checkpoints" / f"step-{step}"
        directory.mkdir(parents=True)
        (directory / "state.json").write_bytes(bytes(nbytes))
        os.utime(self.path / "checkpoints", (NOW - 3600, NOW - 3600))

    def job(self, name: str) -> Path:
        """The log directory of a job; `name` is its id and how often it was restarted."""
        directory = self.path / "slurm" / name
        directory.mkdir(parents=True)
        os.utime(directory, (NOW - 9000, NOW - 9000))
        return directory

    def _line(self, name: str, entry: Mapping[str, Any], ago: float) -> None:
        path = self.path / name
        with path.open("a") as lines:
            lines.write(json.dumps(entry) + "\n")
        os.utime(path, (NOW - ago, NOW - ago))
