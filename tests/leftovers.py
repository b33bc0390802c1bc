"""Processes and shared memory that a program has left behind, found without its help."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path

_PATIENCE_S = 30.0


class Trace:
    """Finds what belongs to a program by an environment variable that everything it starts inherits."""

    def __init__(self) -> None:
        self._value = secrets.token_hex(8)
        self._shared_memory = set(os.listdir("/dev/shm"))

    def environment(self) -> dict[str, str]:
        """The environment in which to start the program."""
        return {**os.environ, "MEGARL_TEST_TRACE": self._value}

    def pids(self) -> list[int]:
        """The program's living processes."""
        found: list[int] = []
        for directory in Path("/proc").iterdir():
            with suppress(OSError):
                if self._value.encode() in (directory / "environ").read_bytes():
                    found.append(int(directory.name))
        return found

    def processes(self) -> list[str]:
        """Command lines of the program's living processes."""
        living: list[str] = []
        for pid in self.pids():
            with suppress(OSError):
                living.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:120])
        return [line for line in living if line]

    def shared_memory(self) -> set[str]:
        """Shared memory files that were not there before and that no living process uses.

        Other programs on the machine may be between making a file and using it, so what is found must stay.
        """
        found = self._unused()
        deadline = time.monotonic() + _PATIENCE_S
        while found and time.monotonic() < deadline:
            time.sleep(0.2)
            found &= self._unused()
        return found

    def _unused(self) -> set[str]:
        used = _inodes_in_use()
        new = set(os.listdir("/dev/shm")) - self._shared_memory
        files = [entry for entry in os.scandir("/dev/shm") if entry.is_file()]  # a benchmark has a directory there
        return {entry.name for entry in files if entry.name in new and entry.inode() not in used}


def comes_true(condition: Callable[[], bool], limit_s: float = 60.0) -> bool:
    """Whether a condition becomes true within some seconds, as for a killed process that has yet to exit."""
    deadline = time.monotonic() + limit_s
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds


def track_own_resources() -> None:
    """Makes shared memory that this process does not remove end with it, and not with its parent."""
    resource_tracker._resource_tracker._fd = None  # pyright: ignore[reportAttributeAccessIssue]
    resource_tracker.ensure_running()


def open_shared_memory(pid: int) -> set[str]:
    """The shared memory files that a process has mapped or open."""
    paths = {line.split()[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()}
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            paths.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    return {path for path in paths if path.startswith("/dev/shm/")}


def _inodes_in_use() -> set[int]:
    """The shared memory files that living processes have mapped; a mapping's name may be a former one."""
    inodes: set[int] = set()
    for directory in Path("/proc").iterdir():
        try:
            maps = (directory / "maps").read_text()
        except OSError:
            continue
        inodes.update(int(line.split()[4]) for line in maps.splitlines() if " /dev/shm/" in line)
    return inodes
