"""A child process that runs code of the user and can always be ended: the parent's side, and how the child begins."""

from __future__ import annotations

import ctypes
import math
import os
import resource
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
from pathlib import Path
from typing import Any, NoReturn

from megarl.errors import RunError
from megarl.stacks import answer_as_child

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PROGRAM = (
    "import sys; sys.path[:] = {path}; from megarl.rewards.child_process import become_supervised;"
    " become_supervised({parent}, {descriptor}, {memory}); from {module} import serve; serve({descriptor})"
)
_REAP_S = 10.0
"""Time for a killed process to end; one that hangs in the kernel is left behind until the run ends."""


class ChildProcess:
    """A child process that runs code of the user, and ends with this process.

    Such code may hang in C code, in a sleep, or in a program that it runs, and only the end of its
    process is sure to stop it. A late call is ended with the process; the next call gets a new one.
    All that a process has started ends with it, also daemons: see `become_supervised`.

    Args:
        module: module whose function `serve` runs in the child.
        setup: first message to the child, which answers with what it has loaded, or with a problem
            as text.
        name: name of what the child loads, for messages.
        memory: bytes of data of the child, and of each process that it starts; None is no limit.

    Attributes:
        loaded: the child's answer; None until there is one.
    """

    def __init__(self, module: str, setup: object, name: str, memory: int | None = None) -> None:
        self._module = module
        self._setup = setup
        self._name = name
        self._memory = memory
        self._child: tuple[subprocess.Popen[bytes], Connection[Any, Any]] | None = None
        self._changing = threading.Lock()  # the child may be closed while another thread starts it
        self.loaded: Any = None

    def start(self, deadline: float = math.inf) -> Connection[Any, Any]:
        """Returns the connection to the child, with no call in progress; starts the child if it is not running.

        Raises:
            RunError: the code cannot be loaded, or not by the deadline, on `time.monotonic`.
        """
        if self._child is not None and self._child[1].poll():
            self.close()  # no message is expected: the child has closed the connection
        if self._child is not None:
            return self._child[1]
        with self._changing:
            _, connection = self._child = self._launch()
        problem = self._load(connection, deadline)
        if problem:
            self.close()
            raise RunError(f"{self._name}: their process cannot start: {problem}")
        return connection

    def send(self, message: object, seconds: float) -> None:
        """Sends a message to a child that runs; an OSError if the child does not take it in time, or has ended.

        The connection is of no use after a message that was taken in part; the child must then be
        ended.
        """
        assert self._child is not None
        connection = self._child[1]
        microseconds = max(1, round(seconds * 1e6))  # 0 would be no limit
        limit = struct.pack("ll", *divmod(microseconds, 10**6))
        with socket.socket(fileno=os.dup(connection.fileno())) as copy:
            copy.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        connection.send(message)

    @property
    def connection(self) -> Connection[Any, Any]:
        """The connection to the child that was started last."""
        assert self._child is not None
        return self._child[1]

    def close(self) -> str:
        """Ends the child and the programs that it has started; returns how the child ended."""
        with self._changing:
            child = self._child
            self._child = None
        if child is None:
            return ""
        process, connection = child
        process.terminate()
        with connection:  # another thread that reads it sees the end before its descriptor is free
            try:
                return how_ended(process.wait(_REAP_S))
            except subprocess.TimeoutExpired:
                process.kill()
                return "nothing: it hangs in the kernel"

    def _launch(self) -> tuple[subprocess.Popen[bytes], Connection[Any, Any]]:
        ours, theirs = socket.socketpair()
        with theirs:
            program = _PROGRAM.format(
                path=repr(sys.path),
                module=self._module,
                descriptor=theirs.fileno(),
                parent=os.getpid(),
                memory=self._memory,
            )
            process = subprocess.Popen(
                [sys.executable, "-u", "-c", program],  # unbuffered: output survives a kill
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        return process, Connection(ours.detach())

    def _load(self, connection: Connection[Any, Any], deadline: float) -> str:
        """Sends the setup, and receives what is loaded; returns why it cannot be, or ""."""
        seconds = None if math.isinf(deadline) else max(deadline - time.monotonic(), 0.0)
        try:
            connection.send(self._setup)
            if not connection.poll(seconds):
                return "no time was left to load them"
            loaded = connection.recv()
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


def become_supervised(parent: int, descriptor: int, memory: int | None) -> None:
    """Continues in a child of this process, which stays as its supervisor.

    The supervisor ends when the child ends, when the parent does, or at SIGTERM, and first kills
    all descendants: the kernel gives it also those whose parents have ended, whatever their group,
    session or environment. It ends as the child did.

    Args:
        parent: id of the parent process; its thread that started this one counts.
        descriptor: descriptor of the connection to the parent, which the child keeps.
        memory: see `ChildProcess`.
    """
    waited = {signal.SIGCHLD, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)
    supervisor = os.getpid()
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.setsid()
        end_with_parent(supervisor)
        if memory is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        return
    os.close(descriptor)
    status = None
    while status is None and signal.sigwait(waited) == signal.SIGCHLD:
        status = _reap(child, os.WNOHANG)
    while True:
        for pid in Path(f"/proc/self/task/{supervisor}/children").read_text().split():
            with suppress(OSError):  # another user's, such as a setuid program
                os.kill(int(pid), signal.SIGKILL)
        try:
            ended = _reap(child, 0)
        except ChildProcessError:
            break
        if status is None:
            status = ended
    _end_like(status or 0)


def _reap(child: int, options: int) -> int | None:
    """Reaps children that have ended, at least one unless `options` say WNOHANG; returns the status of `child`."""
    pid, status = os.waitpid(-1, options)
    while pid not in (0, child):
        pid, status = os.waitpid(-1, os.WNOHANG)
    return status if pid == child else None


def _end_like(status: int) -> NoReturn:
    """Ends this process as another one ended, from that one's status."""
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


@contextmanager
def parent_connection(descriptor: int, part: str) -> Generator[Connection[Any, Any]]:
    """The connection to the parent, in a child that `ChildProcess` has started.

    Args:
        part: part of the parent's name, for stacks.
    """
    answer_as_child(part)
    os.set_inheritable(descriptor, False)  # programs that the user's code starts must not keep it open
    with Connection(descriptor) as connection:
        yield connection


def received(connection: Connection[Any, Any]) -> Iterator[Any]:
    """Yields the messages of a connection until it is closed."""
    with suppress(EOFError):
        while True:
            yield connection.recv()
