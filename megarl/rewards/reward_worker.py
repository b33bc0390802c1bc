"""The parent's side of a child process that runs functions of the user and can always be ended."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from megarl.config.schema import RewardFunction
from megarl.errors import RunError
from megarl.rewards.adapters import CallMode

_PROGRAM = "import sys; sys.path[:] = {path}; from {module} import serve; serve({descriptor}, {parent})"
_REAP_S = 10.0
"""For a killed process to end; one that hangs in the kernel is left behind until the run ends."""


class ChildProcess:
    """A child process that runs code of the user, and ends with this process.

    Such code may hang in C code, in a sleep, or in a program that it runs, and nothing in its own process is sure to
    stop it. What takes too long is ended by killing the process group; the next call gets a new process.

    Args:
        module: its function `serve` runs in the child.
        setup: the first message to the child, which answers with what it has loaded, or with a problem as text.
        name: of what the child loads, for messages.

    Attributes:
        loaded: the child's answer; None until there is one.
    """

    def __init__(self, module: str, setup: object, name: str) -> None:
        self._module, self._setup, self._name = module, setup, name
        self._child: tuple[subprocess.Popen[bytes], Connection[Any, Any]] | None = None
        self.loaded: Any = None

    def start(self, deadline: float = math.inf) -> Connection[Any, Any]:
        """Returns the connection to the child, with no call in progress; starts the child if it is not running.

        Raises:
            RunError: the code cannot be loaded, or not by the deadline, on `time.monotonic`.
        """
        if self._child is not None and self._child[1].poll():  # no message is expected: it has closed the connection
            self.close()
        if self._child is None:
            self._child = self._launch()
            if problem := self._load(self._child[1], deadline):
                self.close()
                raise RunError(f"{self._name}: their process cannot start: {problem}")
        return self._child[1]

    @property
    def connection(self) -> Connection[Any, Any]:
        """The connection to the child that was started last."""
        assert self._child is not None
        return self._child[1]

    def close(self) -> str:
        """Ends the child and the programs that it has started; returns how the child ended."""
        if self._child is None:
            return ""
        (process, connection), self._child = self._child, None
        connection.close()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # before the wait, after which its id may be reused
        try:
            status = process.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            return "nothing: it hangs in the kernel"
        return f"exit status {status}" if status >= 0 else signal.Signals(-status).name

    def _launch(self) -> tuple[subprocess.Popen[bytes], Connection[Any, Any]]:
        ours, theirs = socket.socketpair()
        with theirs:
            place = {"path": repr(sys.path), "module": self._module}
            program = _PROGRAM.format(**place, descriptor=theirs.fileno(), parent=os.getpid())
            process = subprocess.Popen(
                [sys.executable, "-u", "-c", program],  # unbuffered: output survives a kill
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        return process, Connection(ours.detach())

    def _load(self, connection: Connection[Any, Any], deadline: float) -> str:
        """Sends the setup, and receives what is loaded; returns why it cannot be, or ""."""
        patience = None if math.isinf(deadline) else max(deadline - time.monotonic(), 0.0)
        try:
            connection.send(self._setup)
            loaded = connection.recv() if connection.poll(patience) else "no time was left to load them"
        except (EOFError, OSError):
            return self.close()
        if isinstance(loaded, str):
            return loaded
        self.loaded = loaded
        return ""


class FunctionProcess(ChildProcess):
    """A child process that calls reward functions; calls refer to them by index."""

    def __init__(self, functions: Sequence[RewardFunction]) -> None:
        super().__init__("megarl.rewards.reward_child", tuple(functions), "reward functions")

    @property
    def modes(self) -> tuple[CallMode, ...]:
        """Of the functions; empty until they are loaded."""
        return self.loaded or ()
