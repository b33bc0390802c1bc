"""A child process that runs code of the user and can always be ended: the parent's side, and how the child begins."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

from megarl.errors import RunError
from megarl.stacks import answer_as_child

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
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
        self._changing = threading.Lock()  # the child may be closed while another thread starts it
        self.loaded: Any = None

    def start(self, deadline: float = math.inf) -> Connection[Any, Any]:
        """Returns the connection to the child, with no call in progress; starts the child if it is not running.

        Raises:
            RunError: the code cannot be loaded, or not by the deadline, on `time.monotonic`.
        """
        if self._child is not None and self._child[1].poll():  # no message is expected: it has closed the connection
            self.close()
        if self._child is not None:
            return self._child[1]
        with self._changing:
            _, connection = self._child = self._launch()
        if problem := self._load(connection, deadline):
            self.close()
            raise RunError(f"{self._name}: their process cannot start: {problem}")
        return connection

    def send(self, message: object, seconds: float) -> None:
        """Sends a message to a child that runs; an OSError if the child does not take it in time, or has ended.

        The connection is of no use after a message that was taken in part; the child must then be ended.
        """
        assert self._child is not None
        microseconds = max(1, round(seconds * 1e6))  # 0 would be no limit
        with socket.socket(fileno=os.dup(self._child[1].fileno())) as own:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", *divmod(microseconds, 10**6)))
        self._child[1].send(message)

    @property
    def connection(self) -> Connection[Any, Any]:
        """The connection to the child that was started last."""
        assert self._child is not None
        return self._child[1]

    def close(self) -> str:
        """Ends the child and the programs that it has started; returns how the child ended."""
        with self._changing:
            child, self._child = self._child, None
        if child is None:
            return ""
        process, connection = child
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # before the wait, after which its id may be reused
        with connection:  # another thread that reads it is told of the end before its descriptor is free
            try:
                return how_ended(process.wait(_REAP_S))
            except subprocess.TimeoutExpired:
                return "nothing: it hangs in the kernel"

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


def how_ended(status: int) -> str:
    """Returns the end of a process in words, from its `returncode`."""
    return f"exit status {status}" if status >= 0 else signal.Signals(-status).name


def end_with_parent(parent: int) -> None:
    """Has the kernel kill this process when the thread that started it ends, as with the parent; a child calls it."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


@contextmanager
def parent_connection(descriptor: int, parent: int, part: str) -> Generator[Connection[Any, Any]]:
    """The connection to the parent, in a child that `ChildProcess` has started.

    Args:
        parent: id of the parent process, with which the child is killed.
        part: of the parent's name, for stacks.
    """
    end_with_parent(parent)
    answer_as_child(part)
    os.set_inheritable(descriptor, False)  # programs that the user's code starts must not keep it open
    with Connection(descriptor) as connection:
        yield connection


def received(connection: Connection[Any, Any]) -> Iterator[Any]:
    """Yields the messages of a connection until it is closed."""
    with suppress(EOFError):
        while True:
            yield connection.recv()
