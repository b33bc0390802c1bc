"""A daemon that runs in the foreground, as a child process: started, waited for and ended by its process id."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.debian import program

_END_S = 60.0
_TOLD_LINES = 30


class DaemonError(RuntimeError):
    """A daemon did not start, or did not do what was waited for; the message has the end of its log."""


class Daemon:
    """One daemon, whose command must stay in the foreground."""

    def __init__(self, command: Sequence[str | Path], *, log: Path, environment: Mapping[str, str]) -> None:
        self.name = log.stem
        self._command, self._log, self._environment = command, log, dict(environment)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it, in a session of its own: an interrupt in the terminal is for the tests, which then end it.

        Where the tests are killed before they can, the kernel does.
        """
        name, *arguments = (str(word) for word in self._command)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig=KILL", program(name) or name, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )

    def runs(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def wait(self, condition: Callable[[], str], what: str, *, limit_s: float = 60.0) -> None:
        """Returns when a condition, which says what is missing, is silent; else raises DaemonError."""
        deadline = time.monotonic() + limit_s
        while lacking := condition():
            if not self.runs():
                raise DaemonError(f"{self.name} ended before it was {what}: {lacking}\n{self.tail()}")
            if time.monotonic() > deadline:
                raise DaemonError(f"{self.name} was not {what} within {limit_s:g} s: {lacking}\n{self.tail()}")
            time.sleep(0.05)

    def tail(self) -> str:
        """The end of its log."""
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        return "\n".join((f"The end of {self._log.name}:", *(f"  {line}" for line in lines[-_TOLD_LINES:])))

    def stop(self) -> None:
        """Ends it in its own way, and by force where that takes too long."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Ends it at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
