"""The parent's side of a child process that calls reward functions and can always be ended."""

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

_PROGRAM = (
    "import sys; sys.path[:] = {path}; from megarl.rewards.reward_child import serve; serve({descriptor}, {parent})"
)
_REAP_S = 10.0
"""For a killed process to end; one that hangs in the kernel is left behind until the run ends."""


class FunctionProcess:
    """A child process that calls reward functions, and ends with this process.

    A function may hang in C code, in a sleep, or in a program that it runs, and nothing in its own process is sure to
    stop it. A call that takes too long is ended by killing the process group; the next call gets a new process.

    Args:
        functions: calls refer to them by index.

    Attributes:
        modes: of the functions; empty until they are loaded.
    """

    def __init__(self, functions: Sequence[RewardFunction]) -> None:
        self._functions = tuple(functions)
        self._child: tuple[subprocess.Popen[bytes], Connection[Any, Any]] | None = None
        self.modes: tuple[CallMode, ...] = ()

    def start(self, deadline: float = math.inf) -> Connection[Any, Any]:
        """Returns the connection to the child, with no call in progress; starts the child if it is not running.

        Raises:
            RunError: a function cannot be loaded, or not by the deadline, on `time.monotonic`.
        """
        if self._child is not None and self._child[1].poll():  # no message is expected: it has closed the connection
            self.close()
        if self._child is None:
            self._child = self._launch()
            if problem := self._load(self._child[1], deadline):
                self.close()
                raise RunError(f"reward functions: their process cannot start: {problem}")
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
            program = _PROGRAM.format(path=repr(sys.path), descriptor=theirs.fileno(), parent=os.getpid())
            process = subprocess.Popen(
                [sys.executable, "-u", "-c", program],  # unbuffered: output survives a kill
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        return process, Connection(ours.detach())

    def _load(self, connection: Connection[Any, Any], deadline: float) -> str:
        """Sends the functions, and receives their modes; returns why they cannot be loaded, or ""."""
        patience = None if math.isinf(deadline) else max(deadline - time.monotonic(), 0.0)
        try:
            connection.send(self._functions)
            loaded = connection.recv() if connection.poll(patience) else "no time was left to load them"
        except (EOFError, OSError):
            return self.close()
        if isinstance(loaded, str):
            return loaded
        self.modes = loaded
        return ""
