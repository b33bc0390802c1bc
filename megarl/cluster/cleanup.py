"""Finds and ends the processes of a session by a mark in the environment that they inherit.

The process tree does not find them: a child of a killed process gets another parent. A living
process's initial environment stays readable.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from megarl.cluster.ray_node import ray_directory
from megarl.errors import RunError
from megarl.files import remove_tree

MARK = "MEGARL_SESSION"
SHARED_MEMORY = Path("/dev/shm")
_PROC = Path("/proc")
_STUCK_S = 60.0
"""Wait for killed processes to disappear."""
_GRACE_S = 5.0
_GUARD_S = 90.0  # for the guard to end: longer than it waits for processes
_BLOCKED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)  # Slurm and terminals signal whole jobs


def marked_processes(mark: str) -> list[int]:
    """Returns the pids of the living processes with this mark, except this one."""
    wanted = f"{MARK}={mark}".encode()
    found: list[int] = []
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        pid = int(entry.name)
        if pid != os.getpid() and wanted in _read(entry / "environ").split(b"\0") and _alive(pid):
            found.append(pid)
    return found


def shared_memory_of(pids: Sequence[int]) -> set[Path]:
    """Returns the shared memory files that processes have mapped.

    Files are identified by inode, because a semaphore is mapped under the name that it had before
    it was renamed.
    """
    inodes: set[int] = set()
    for pid in pids:
        for line in _read(_PROC / str(pid) / "maps").splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith(f"{SHARED_MEMORY}/".encode()):
                inodes.add(int(fields[4]))
    return {Path(entry.path) for entry in os.scandir(SHARED_MEMORY) if entry.inode() in inodes}


class ProcessCleanup:
    """Ends the marked processes of a session, and removes their shared memory."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._files: set[Path] = set()

    def note(self) -> None:
        """Remembers the shared memory of the living processes, which cannot be found once they are killed."""
        self._files |= shared_memory_of(marked_processes(self._mark))

    def remove(self, grace_s: float) -> None:
        """Waits `grace_s` seconds for the processes to end, kills those that are left, and removes shared memory."""
        deadline = time.monotonic() + grace_s
        while left := marked_processes(self._mark):
            self._files |= shared_memory_of(left)
            if time.monotonic() > deadline + _STUCK_S:
                raise RunError(f"processes {left} of the run do not end even when killed: a driver may be stuck")
            if time.monotonic() > deadline:
                _signal(left, signal.SIGKILL)
            time.sleep(0.05)
        for file in self._files:
            file.unlink(missing_ok=True)


class Guard:
    """A process that cleans up after the one that starts it, even after a SIGKILL, which closes the pipe that it reads.

    It has no mark itself. Where Slurm tracks processes by cgroup, it kills the guard with the rest
    of a task whose agent is killed: then temporary files stay.
    """

    def __init__(self, mark: str, directory: str, environment: Mapping[str, str], logs: Path | None = None) -> None:
        self._mark = mark
        self._directory = directory
        self._logs = logs
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)  # a child inherits which signals are blocked
        try:
            # With -m, modules of the working directory would come before the standard library.
            program = f"import sys; sys.path[:] = {sys.path}; from {__name__} import main; main()"
            command = [sys.executable, "-c", program, mark, directory]
            if logs is not None:
                command.append(str(logs))
            unmarked = {name: value for name, value in environment.items() if name != MARK}
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env=unmarked, start_new_session=True)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def remove(self, file: Path) -> None:
        """Makes the guard remove a file, too, when it cleans up."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # somebody killed the guard
            self._process.stdin.write(os.fsencode(file.absolute()) + b"\0")
            self._process.stdin.flush()

    def finish(self, *, failed: bool) -> bool:
        """Makes the guard clean up, and waits for it; returns whether nothing is left."""
        try:
            self._process.communicate(b"" if failed else b"done", timeout=_GUARD_S)
            if self._process.returncode < 0:  # somebody killed the guard
                clean_up(self._mark, self._directory, self._logs if failed else None)
        except (RunError, subprocess.TimeoutExpired) as error:
            print(error, file=sys.stderr)
            return False
        return self._process.returncode <= 0

    def dismiss(self) -> None:
        """Ends the guard where nothing is left to clean up."""
        with self._process:
            self._process.kill()


def clean_up(mark: str, directory: str, logs: Path | None) -> None:
    """Ends the marked processes and removes the directory; Ray's logs are kept in `logs`, if that is given.

    Raises RunError where processes do not end.
    """
    cleanup = ProcessCleanup(mark)
    try:
        cleanup.note()
        _signal(marked_processes(mark), signal.SIGTERM)
        cleanup.remove(_GRACE_S)
    finally:
        source = Path(ray_directory(directory)) / "session_latest" / "logs"
        if logs is not None and source.is_dir():
            try:
                shutil.copytree(source, logs, dirs_exist_ok=True, ignore_dangling_symlinks=True)
            except OSError as error:
                print(f"Ray's logs of this node are not kept in {logs}: {error}", file=sys.stderr)
        remove_tree(directory)


def _alive(pid: int) -> bool:
    """Returns whether a process runs; a zombie does not."""
    stat = _read(_PROC / str(pid) / "stat")
    return bool(stat) and stat.rpartition(b")")[2].split()[0] not in (b"Z", b"X")


def _read(path: Path) -> bytes:
    """Returns the content of a file in /proc; b"" where the process has ended or belongs to another user."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def main() -> None:
    """Cleans up when the pipe is closed; see `Guard`."""
    *files, message = sys.stdin.buffer.read().split(b"\0")
    mark, directory, *rest = sys.argv[1:]
    logs = Path(rest[0]) if rest and not message else None
    try:
        clean_up(mark, directory, logs)
    except RunError as error:
        sys.exit(str(error))
    finally:
        for file in files:
            Path(os.fsdecode(file)).unlink(missing_ok=True)
