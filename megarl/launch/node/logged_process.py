"""Child processes whose output is logged."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, BinaryIO, cast

_DRAIN_S = 2.0  # for the last output of an ended process, whose children may have inherited the pipe
_AGAIN_S = 0.5
_KILLED_S = 10.0
_CHUNK_BYTES = 1 << 16


class LoggedProcess:
    """A child process whose stdout and stderr are appended to a log file and copied to `echo`."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, echo: BinaryIO | None = None
    ) -> None:
        self._output = b""
        # Slurm sends SIGUSR1 to all processes of the job, and only the driver of the run handles it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        try:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._copying = threading.Thread(target=self._copy, args=(log, echo), daemon=True)
        self._copying.start()

    def _copy(self, log: Path, echo: BinaryIO | None) -> None:
        """Copies the output, and keeps reading if that fails: a full disk must not block the process."""
        output = cast(IO[bytes], self._process.stdout).fileno()
        with contextlib.ExitStack() as stack:
            copies: list[BinaryIO] = []
            if echo is not None:
                copies.append(echo)
            with contextlib.suppress(OSError):
                copies.append(stack.enter_context(log.open("ab")))
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
        """The output from its last line that is not indented."""
        return re.split(r"\n(?=\S)", self.output)[-1]

    @property
    def exit_code(self) -> int | None:
        """None while it runs; 128 plus the signal's number after a signal."""
        code = self._process.poll()
        if code is None:
            return None
        self._copying.join(_DRAIN_S)
        return code if code >= 0 else 128 - code

    def send(self, number: signal.Signals) -> None:
        """Sends a signal, if it still runs."""
        self._process.send_signal(number)

    def stop(self, grace_s: float) -> None:
        """Sends SIGTERM, once more as a run may save after the first, and SIGKILL after the grace."""
        terminate = self._process.terminate
        kill = self._process.kill
        for end, limit_s in ((terminate, _AGAIN_S), (terminate, grace_s), (kill, _KILLED_S)):
            end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(limit_s)
                return
