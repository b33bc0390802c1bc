"""The attempts at a run, a process each: when and where it began, and how it ended. The file attempts.jsonl.

An attempt has a line for its start and one for its end, which a process that is killed cannot write. What cannot be
written is told and left out: an account of a run must neither fail it nor hide what did.
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

Reason = Literal["finished", "interrupted", "config error", "run error", "exception"]

_LONGEST_MESSAGE = 4000


@dataclass(frozen=True, kw_only=True)
class End:
    """How an attempt ended.

    Args:
        time: seconds since 1970.
        step: the last one that was told.
        reason: in a word or two.
        message: what the user was told of it; of an interruption the signal's name; empty of a run that finished.
    """

    time: float
    step: int
    reason: Reason
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One process's attempt at a run.

    Args:
        number: from 1.
        time: of its start, seconds since 1970.
        step: that it goes on after; 0 at the beginning.
        host, pid: of the driver.
        job: Slurm's number of the job; None outside of one.
        restart: how often Slurm had started that job before.
        end: None while it lasts, and where its process could not tell.
    """

    number: int
    time: float
    step: int
    host: str
    pid: int
    job: str | None = None
    restart: int = 0
    end: End | None = None


class AttemptLog:
    """Adds the attempt of this process to a file.

    Args:
        path: of the file.
        clock: seconds since 1970.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path, self._clock = path, clock
        self._number = 1

    def start(self, step: int) -> None:
        """Notes the start.

        Args:
            step: that the run goes on after.
        """
        with _told(self._path):
            self._number = 1 + max((attempt.number for attempt in read_attempts(self._path)), default=0)
        attempt = Attempt(
            number=self._number,
            time=self._clock(),
            step=step,
            host=socket.gethostname(),
            pid=os.getpid(),
            job=os.environ.get("SLURM_JOB_ID"),
            restart=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
        )
        fields = asdict(attempt)
        del fields["end"]
        self._append({"event": "start", **fields})

    def end(self, step: int, reason: Reason, message: str = "") -> None:
        """Notes the end; see End."""
        told = End(time=self._clock(), step=step, reason=reason, message=message[:_LONGEST_MESSAGE])
        self._append({"event": "end", "number": self._number, **asdict(told)})

    def _append(self, entry: dict[str, Any]) -> None:
        """Adds a line, durably; half a line that a killed process left stays a line of its own."""
        with _told(self._path):
            with self._path.open("a+b") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
                torn = file.read() not in (b"", b"\n")
                file.write(b"\n" * torn + json.dumps(entry).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            sync(self._path.parent)


def read_attempts(path: Path) -> list[Attempt]:
    """The attempts that a file tells of, in order; none where it is missing. What it should not hold is left out."""
    attempts: dict[int, Attempt] = {}
    for line in read_lines(path):
        event = line.pop("event", None)
        with contextlib.suppress(TypeError, KeyError):
            if event == "start":
                attempts[line["number"]] = Attempt(**line)
            elif event == "end":
                number = line.pop("number")
                attempts[number] = replace(attempts[number], end=End(**line))
    return list(attempts.values())


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """Goes on without what cannot be read or written, on a full disk for example, and says so."""
    try:
        yield
    except OSError as error:
        with contextlib.suppress(OSError, ValueError):  # ValueError: standard error is closed
            print(f"{path}: {error.strerror}; megarl status will not know of this attempt", file=sys.stderr)
