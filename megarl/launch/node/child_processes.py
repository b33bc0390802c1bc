"""The processes that an agent starts: commands with a log, and the guard that ends all of them however the agent ends.

The guard holds the other end of a pipe, which closes when the agent closes it or dies, even of SIGKILL. Where Slurm
tracks processes by cgroup, it kills the guard with the rest of a task whose agent is killed: then temporary files stay.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, BinaryIO, cast

from megarl.cluster.cleanup import ProcessCleanup
from megarl.errors import RunError

_DRAIN_S = 2.0  # for the last output of a process that has ended: others may have inherited the pipe
_GRACE_S, _KILLED_S = 5.0, 10.0
_GUARD_S = 90.0  # for the guard to end: longer than it waits for processes
_CHUNK_BYTES = 1 << 16
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class LoggedProcess:
    """A child process whose output, stdout and stderr, is appended to a log file and, if there is one, to the echo."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, echo: BinaryIO | None = None
    ) -> None:
        self._output = b""
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self._copying = threading.Thread(target=self._copy, args=(log, echo), daemon=True)
        self._copying.start()

    def _copy(self, log: Path, echo: BinaryIO | None) -> None:
        """Keeps reading when a copy fails: neither a full disk nor a closed stdout may block the process."""
        output = cast(IO[bytes], self._process.stdout).fileno()
        with contextlib.ExitStack() as stack:
            copies = [] if echo is None else [echo]
            with contextlib.suppress(OSError):
                copies.append(stack.enter_context(log.open("ab", buffering=0)))
            while chunk := os.read(output, _CHUNK_BYTES):
                self._output = (self._output + chunk)[-_CHUNK_BYTES:]
                for copy in copies:
                    with contextlib.suppress(OSError):
                        copy.write(chunk)
                        copy.flush()

    @property
    def output(self) -> str:
        """The end of the output so far."""
        return self._output.decode(errors="replace").rstrip()

    @property
    def last_message(self) -> str:
        """The last line of the output; where it is indented, everything from the last line that is not."""
        lines = self.output.split("\n")
        first = max((index for index, line in enumerate(lines) if line[:1].strip()), default=0)
        return "\n".join(lines[first:])

    @property
    def exit_code(self) -> int | None:
        """None while it runs; 128 plus the signal's number after a signal."""
        code = self._process.poll()
        if code is not None:
            self._copying.join(_DRAIN_S)
        return code if code is None or code >= 0 else 128 - code

    def stop(self, grace_s: float) -> None:
        """Sends SIGTERM, and SIGKILL after the grace."""
        for end, limit_s in ((self._process.terminate, grace_s), (self._process.kill, _KILLED_S)):
            end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(limit_s)
                return


class Guard:
    """The agent's handle of the process that cleans up after it; see `clean_up`. Its environment lacks the mark."""

    def __init__(self, mark: str, directory: str, logs: Path, environment: dict[str, str]) -> None:
        self._arguments = (mark, directory, str(logs))
        # Slurm signals all processes of a job; a child inherits which signals are blocked.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            command = [sys.executable, "-m", __name__, *self._arguments]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def finish(self, *, failed: bool) -> bool:
        """Has the guard clean up, and waits for it; returns whether nothing is left."""
        try:
            self._process.communicate(b"" if failed else b"done", timeout=_GUARD_S)
            if self._process.returncode < 0:  # somebody killed the guard
                clean_up(*self._arguments, failed=failed)
        except (RunError, subprocess.TimeoutExpired) as error:
            print(error, file=sys.stderr)
            return False
        return self._process.returncode <= 0


def clean_up(mark: str, directory: str, logs: str, *, failed: bool) -> None:
    """Ends the processes with the mark, and removes what they leave. Raises RunError where some do not end.

    Args:
        mark: in the environment of the processes to end.
        directory: to remove, with Ray's session in it.
        logs: where Ray's logs are kept if the job failed.
    """
    remains = ProcessCleanup(mark)
    try:
        remains.note()
        remains.terminate()
        remains.remove(_GRACE_S)
    finally:
        source = Path(directory) / "session_latest" / "logs"
        if failed and source.is_dir():
            try:
                shutil.copytree(source, logs, dirs_exist_ok=True, ignore_dangling_symlinks=True)
            except OSError as error:
                print(f"Ray's logs of this node are not kept in {logs}: {error}", file=sys.stderr)
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    told = sys.stdin.read()  # returns when the agent closes the pipe, or is gone
    try:
        clean_up(*sys.argv[1:], failed=not told)
    except RunError as error:
        sys.exit(str(error))
