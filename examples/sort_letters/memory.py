"""How much memory the processes of a program take together, seen from outside."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from types import TracebackType
from typing import Self

_MARK = "MEGARL_DEMO"
_INTERVAL_S = 2.0
_PROC = Path("/proc")


class MemoryWatch:
    """Notes the largest memory at once of this process and all that was started in its environment, from a thread.

    Memory is the proportional set size (PSS): what several processes share, shared memory included, is counted once.
    Processes are told by a variable of their environment: one whose parent has ended has another parent.
    """

    def __init__(self) -> None:
        self.environment = {**os.environ, _MARK: secrets.token_hex(8)}
        """In which to start the processes."""
        self.peak_bytes = 0
        """The largest memory at once, so far."""
        self._wanted = f"{_MARK}={self.environment[_MARK]}".encode()
        self._ended = Event()
        self._thread = Thread(target=self._watch, daemon=True)

    def now(self) -> int:
        """Bytes that this process and the others that live take."""
        return sum(map(_pss, [_PROC / "self", *self._marked()]))

    def _watch(self) -> None:
        while not self._ended.wait(_INTERVAL_S):
            self._look()

    def _look(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.now())

    def _marked(self) -> Iterator[Path]:
        for directory in _PROC.iterdir():
            if directory.name.isdigit() and self._wanted in _read(directory / "environ").split(b"\0"):
                yield directory

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._look()


def _pss(process: Path) -> int:
    for line in _read(process / "smaps_rollup").splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def _read(path: Path) -> bytes:
    """What a process lets others read of itself; nothing where it has ended or is somebody else's."""
    try:
        return path.read_bytes()
    except OSError:
        return b""
