"""A child process that calls reward functions and can always be ended: the parent's side and the child's."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from numbers import Real
from typing import Any

import numpy as np

from megarl.config.schema import RewardFunction
from megarl.errors import RunError
from megarl.rewards.functions import Completion, bind

Request = tuple[int, Completion]
"""The index of a function, and its argument."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a call returned no score.

    Args:
        kind: only the first failure of each kind is reported.
        reason: a sentence, or the function's traceback.
    """

    kind: str
    reason: str


Reply = float | Failure

_LARGEST = float(np.finfo(np.float32).max)
_PR_SET_PDEATHSIG = 1


def serve(descriptor: int, parent: int) -> None:
    """Runs in the child: receives the functions, sends "" when they are loaded, and answers requests until the end.

    Args:
        descriptor: of the connection.
        parent: id of the parent process; the child is killed when it ends.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    os.set_inheritable(descriptor, False)  # programs that a function starts must not keep it open
    with Connection(descriptor) as connection:
        functions: Sequence[RewardFunction] = connection.recv()
        try:
            bound = [bind(function) for function in functions]
        except ValueError as error:
            connection.send(str(error))
            return
        connection.send("")
        while True:
            try:
                number, completion = connection.recv()
            except EOFError:
                return
            connection.send(reply(bound[number], completion))


def reply(function: Callable[[Completion], Any], completion: Completion) -> Reply:
    """Returns the score of a completion; a failure when the function raises or returns anything else."""
    try:
        value = function(completion)
        if isinstance(value, Real | np.bool_) and abs(float(value)) <= _LARGEST:
            return float(value)
        shown = repr(value)
    except Exception as error:  # the user's own code
        own = error.__traceback__ and error.__traceback__.tb_next
        told = "".join(traceback.format_exception(type(error), error, own)).rstrip()
        return Failure(kind=type(error).__name__, reason=told)
    short = shown if len(shown) <= 200 else f"{shown[:200]}..."
    kind = type(value).__name__
    return Failure(kind=kind, reason=f"it returned {short}, a {kind}: it must return one finite number")


_PROGRAM = (
    "import sys; sys.path[:] = {path}; from megarl.rewards.reward_worker import serve; serve({descriptor}, {parent})"
)
_REAP_S = 10.0
"""For a killed process to end; one that hangs in the kernel is left behind until the run ends."""


class CallError(RuntimeError):
    """A call of a reward function returned no score; the message is the reason."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


@dataclass(frozen=True, kw_only=True)
class _Child:
    process: subprocess.Popen[bytes]
    connection: Connection[Any, Any]


class FunctionProcess:
    """Calls reward functions in a child process, one at a time.

    A function may hang in C code, in a sleep, or in a program that it runs, and nothing in its own process is sure to
    stop it. A call that takes too long is ended by killing the process group; the next call gets a new process.
    The child ends with this process.

    Args:
        functions: calls refer to them by index.
    """

    def __init__(self, functions: Sequence[RewardFunction]) -> None:
        self._functions = tuple(functions)
        self._child: _Child | None = None

    def start(self) -> None:
        """Starts the child, unless it is running, and waits until it has loaded the functions.

        Raises:
            RunError: a function cannot be loaded.
        """
        self._running(math.inf)

    def call(self, function: int, completion: Completion, time_limit: float, deadline: float = math.inf) -> float:
        """Returns the score of a completion.

        Args:
            function: its index.
            time_limit: seconds of the call itself.
            deadline: on `time.monotonic`, of the call and of the start of a new child, if one is needed.

        Raises:
            CallError: the function failed, took too long, ended its process, or returned anything but a finite number;
                or a new child could not load the functions.
        """
        try:
            connection = self._running(deadline).connection
        except RunError as error:
            raise CallError(Failure(kind="no process", reason=str(error))) from None
        time_limit = min(time_limit, max(deadline - time.monotonic(), 0.0))
        try:
            connection.send((function, completion))
            answered = connection.poll(time_limit)
            reply: Reply = connection.recv() if answered else math.nan
        except (EOFError, OSError):
            raise CallError(Failure(kind="end", reason=f"its process ended by {self.close()}")) from None
        if not answered:
            self.close()
            raise CallError(Failure(kind="time", reason=f"it took longer than {time_limit:g} s, and was ended"))
        if isinstance(reply, Failure):
            raise CallError(reply)
        return reply

    def close(self) -> str:
        """Ends the child and the programs that it has started; returns how the child ended."""
        if self._child is None:
            return ""
        child, self._child = self._child, None
        child.connection.close()
        with suppress(ProcessLookupError):
            os.killpg(child.process.pid, signal.SIGKILL)  # before the wait, after which its id may be reused
        try:
            status = child.process.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            return "nothing: it hangs in the kernel"
        return f"exit status {status}" if status >= 0 else signal.Signals(-status).name

    def _running(self, deadline: float) -> _Child:
        if (
            self._child is not None and self._child.connection.poll()
        ):  # no message is expected: it has closed the connection
            self.close()
        if self._child is None:
            self._child = _launch()
            problem = self._load(self._child.connection, deadline)
            if problem:
                self.close()
                raise RunError(f"reward functions: their process cannot start: {problem}")
        return self._child

    def _load(self, connection: Connection[Any, Any], deadline: float) -> str:
        """Sends the functions, and returns the problem of loading them."""
        patience = None if math.isinf(deadline) else max(deadline - time.monotonic(), 0.0)
        try:
            connection.send(self._functions)
            return connection.recv() if connection.poll(patience) else "no time was left to load them"
        except (EOFError, OSError):
            return self.close()


def _launch() -> _Child:
    ours, theirs = socket.socketpair()
    with theirs:
        program = _PROGRAM.format(path=repr(sys.path), descriptor=theirs.fileno(), parent=os.getpid())
        process = subprocess.Popen(
            [sys.executable, "-u", "-c", program],  # unbuffered: output survives a kill
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    return _Child(process=process, connection=Connection(ours.detach()))
