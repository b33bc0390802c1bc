"""The attempts at a run: attempts.jsonl.

Each attempt has a line for its start and, unless the process was killed, one for its end. If the
file cannot be written, a message is printed and nothing fails: that must not end the
run or hide what did.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from megarl.files import read_lines, sync

EndReason = Literal["finished", "profiled", "preempted", "interrupted", "config error", "run error", "exception"]

_LONGEST_MESSAGE = 4000


@dataclass(frozen=True, kw_only=True)
class AttemptEnd:
    """How an attempt ended.

    Args:
        time: seconds since 1970.
        step: last step in metrics.jsonl.
        message: error, or name of the signal, if any.
    """

    time: float
    step: int
    reason: EndReason
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """An attempt at a run: a start of its command, or a restart in it.

    Args:
        number: from 1.
        time: start of the attempt, or of its process; seconds since 1970.
        step: step that it resumed after; 0 at the beginning.
        job, restart: number of the Slurm job, if any, and of its restarts by Slurm.
        end: None while it runs, or if its process was killed.
    """

    number: int
    time: float
    step: int
    host: str
    pid: int
    job: str | None = None
    restart: int = 0
    end: AttemptEnd | None = None


class AttemptLog:
    """Appends an attempt of this process to a file; `clock` gives seconds since 1970."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._number = 1

    def start(self, step: int, age: float = 0.0) -> None:
        """Records the start of an attempt that resumes after `step` and began `age` seconds ago."""
        with _report_errors(self._path):
            self._number = 1 + max((attempt.number for attempt in read_attempts(self._path)), default=0)
        attempt = Attempt(
            number=self._number,
            time=self._clock() - age,
            step=step,
            host=socket.gethostname(),
            pid=os.getpid(),
            job=os.environ.get("SLURM_JOB_ID"),
            restart=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
        )
        fields = asdict(attempt)
        del fields["end"]
        self._append({"event": "start", **fields})

    def end(self, step: int, reason: EndReason, message: str = "") -> None:
        end = AttemptEnd(time=self._clock(), step=step, reason=reason, message=message[:_LONGEST_MESSAGE])
        self._append({"event": "end", "number": self._number, **asdict(end)})

    def _append(self, entry: dict[str, Any]) -> None:
        """Appends a line durably, after completing the line of a killed process."""
        with _report_errors(self._path):
            with self._path.open("a+b") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
                torn = file.read() not in (b"", b"\n")
                file.write(b"\n" * torn + json.dumps(entry).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            sync(self._path.parent)


def read_attempts(path: Path) -> list[Attempt]:
    """Returns the attempts in a file, in order; none if it is missing. Lines with unknown fields are skipped."""
    attempts: dict[int, Attempt] = {}
    for line in read_lines(path):
        event = line.pop("event", None)
        with contextlib.suppress(TypeError, KeyError):
            if event == "start":
                attempts[line["number"]] = Attempt(**line)
            elif event == "end":
                number = line.pop("number")
                attempts[number] = replace(attempts[number], end=AttemptEnd(**line))
    return list(attempts.values())


@contextlib.contextmanager
def _report_errors(path: Path) -> Iterator[None]:
    """Prints errors of reading and writing, as on a full disk, and continues."""
    try:
        yield
    except OSError as error:
        if not path.parent.is_dir():  # the run's own error says so
            return
        with contextlib.suppress(OSError, ValueError):  # ValueError: standard error is closed
            print(f"{path}: {error.strerror}; megarl status will not know of this attempt", file=sys.stderr)
