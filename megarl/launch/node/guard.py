"""The process that ends and removes what an agent has started, however the agent ends.

It holds the other end of a pipe, which closes when the agent closes it or is gone, be it killed. Before that, each line
of the pipe says where Ray's logs are to be kept; an empty one, that they need not be. Where Slurm tracks processes by
cgroup, it kills the guard with the rest of a task whose agent is killed: then temporary files stay on the node.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, cast

from megarl.cluster.cleanup import Remains
from megarl.errors import RunError

_GRACE_S = 5.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_LIMIT_S = 90.0
"""For the guard to end: longer than it waits for processes that do not end."""


class Guard:
    """The agent's side of it.

    Args:
        mark: of the processes to end.
        directory: to remove, with Ray's session in it.
        environment: without the mark.
    """

    def __init__(self, mark: str, directory: str, environment: dict[str, str]) -> None:
        self._mark, self._directory, self._keep = mark, directory, ""
        # Slurm sends a job's signals to all its processes; those that are blocked stay so in a child.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, mark, directory],
                stdin=subprocess.PIPE,
                env=environment,
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._pipe = cast(IO[bytes], self._process.stdin)

    def keep_logs(self, directory: Path | None) -> None:
        """Says where Ray's logs are to be kept; None, that they need not be."""
        self._keep = str(directory or "")
        with contextlib.suppress(BrokenPipeError):  # it was killed; its work is done by the agent
            self._pipe.write(f"{self._keep}\n".encode())
            self._pipe.flush()

    def finish(self) -> bool:
        """Has it do its work, and waits for it; whether nothing is left."""
        with contextlib.suppress(BrokenPipeError):  # again: what was not flushed
            self._pipe.close()
        try:
            code = self._process.wait(_LIMIT_S)
            if code < 0:
                clean(self._mark, self._directory, self._keep)
        except (RunError, subprocess.TimeoutExpired) as error:
            print(error, file=sys.stderr)
            return False
        return code <= 0


def clean(mark: str, directory: str, keep: str) -> None:
    """Ends the processes with the mark, and removes what they leave.

    Raises:
        RunError: some do not end.
    """
    remains = Remains(mark)
    try:
        remains.note()
        remains.terminate()
        remains.remove(_GRACE_S)
    finally:
        logs = Path(directory) / "session_latest" / "logs"
        if keep and logs.is_dir():
            try:
                shutil.copytree(logs, keep, dirs_exist_ok=True, ignore_dangling_symlinks=True)
            except OSError as error:
                print(f"Ray's logs of this node are not kept in {keep}: {error}", file=sys.stderr)
        shutil.rmtree(directory, ignore_errors=True)


def main(mark: str, directory: str) -> None:
    """Waits for the end of the agent, and cleans up after it."""
    keep = ""
    for line in sys.stdin:
        keep = line.strip()
    try:
        clean(mark, directory, keep)
    except RunError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
