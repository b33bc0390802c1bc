"""Finding and ending the processes that a session started, by a mark that all of them inherit.

A process tree is no good guide: a child of a process that was killed has another parent. The environment
with which a process was started stays readable as long as it lives.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection
from pathlib import Path

from megarl.errors import RunError

MARK = "MEGARL_SESSION"
SHARED_MEMORY = Path("/dev/shm")
_PROC = Path("/proc")
_STUCK_S = 60.0
"""After the grace, for processes that were killed to go."""


def marked_processes(mark: str) -> list[int]:
    """The pids of the living processes that were started with this mark in their environment."""
    wanted = f"{MARK}={mark}".encode()
    return [pid for pid in _pids() if pid != os.getpid() and wanted in _environment(pid) and _alive(pid)]


def shared_memory_of(pids: Collection[int]) -> set[Path]:
    """The files of shared memory that these processes have mapped.

    They are told by inode: a semaphore is mapped under the name that it had before it was renamed.
    """
    inodes: set[int] = set()
    for pid in pids:
        for line in _read(_PROC / str(pid) / "maps").splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith(f"{SHARED_MEMORY}/".encode()):
                inodes.add(int(fields[4]))
    return {Path(entry.path) for entry in os.scandir(SHARED_MEMORY) if entry.inode() in inodes}


class ProcessCleanup:
    """Ends the marked processes of a session, and removes what they shared.

    Args:
        mark: of the session.
    """

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._files: set[Path] = set()

    def note(self) -> None:
        """Remembers the shared memory of the living processes: once they are killed, nothing tells whose it was."""
        self._files |= shared_memory_of(marked_processes(self._mark))

    def terminate(self) -> None:
        """Asks the processes to end, with SIGTERM."""
        for pid in marked_processes(self._mark):
            _signal(pid, signal.SIGTERM)

    def remove(self, grace_s: float) -> None:
        """Waits until no process is left, kills those that outlive the grace, and removes their shared memory.

        Args:
            grace_s: seconds for processes to end by themselves: some clean up after their parents.
        """
        deadline = time.monotonic() + grace_s
        while left := marked_processes(self._mark):
            self._files |= shared_memory_of(left)
            if time.monotonic() > deadline + _STUCK_S:
                raise RunError(f"processes {left} of the run do not end even when killed: a driver may be stuck")
            if time.monotonic() > deadline:
                for pid in left:
                    _signal(pid, signal.SIGKILL)
            time.sleep(0.05)
        for file in self._files:
            file.unlink(missing_ok=True)


def _pids() -> list[int]:
    return [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()]


def _environment(pid: int) -> list[bytes]:
    return _read(_PROC / str(pid) / "environ").split(b"\0")


def _alive(pid: int) -> bool:
    """Whether it runs; a zombie that nobody has waited for does not."""
    stat = _read(_PROC / str(pid) / "stat")
    return bool(stat) and stat.rpartition(b")")[2].split()[0] not in (b"Z", b"X")


def _read(path: Path) -> bytes:
    """What a process lets others read of itself; nothing where it has ended or is somebody else's."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
