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

_LARGEST = float(np.finfo(np.float32).max)
_PR_SET_PDEATHSIG = 1
_PROGRAM = (
    "import sys; sys.path[:] = {path}; from megarl.rewards.reward_worker import serve; serve({descriptor}, {parent})"
)
_REAP_S = 10.0
"""For a killed process to end; one that hangs in the kernel is left behind until the run ends."""


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


def serve(descriptor: int, parent: int) -> None:
    """Runs in the child: receives the functions, sends "" when they are loaded, and answers calls until the end.

    Args:
        descriptor: of the connection.
        parent: id of the parent process, with which the child is killed.
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
                function, completion = connection.recv()
            except EOFError:
                return
            connection.send(reply(bound[function], completion))


def reply(function: Callable[[Completion], Any], completion: Completion) -> Reply:
    """Returns the score of a completion; a failure if the function raises, or returns anything but a finite number."""
    try:
        value = function(completion)
        if isinstance(value, Real | np.bool_) and abs(float(value)) <= _LARGEST:
            return float(value)
        shown = repr(value)
    except Exception as error:  # the user's own code
        own = error.__traceback__ and error.__traceback__.tb_next
        reason = "".join(traceback.format_exception(type(error), error, own)).rstrip()
        return Failure(kind=type(error).__name__, reason=reason)
    short = shown if len(shown) <= 200 else f"{shown[:200]}..."
    kind = type(value).__name__
    return Failure(kind=kind, reason=f"it returned {short}, a {kind}: it must return one finite number")


class FunctionProcess:
    """Calls reward functions in a child process, one at a time. The child ends with this process.

    A function may hang in C code, in a sleep, or in a program that it runs, and nothing in its own process is sure to
    stop it. A call that takes too long is ended by killing the process group; the next call gets a new process.

    Args:
        functions: calls refer to them by index.
    """

    def __init__(self, functions: Sequence[RewardFunction]) -> None:
        self._functions = tuple(functions)
        self._child: tuple[subprocess.Popen[bytes], Connection[Any, Any]] | None = None

    def start(self, deadline: float = math.inf) -> Connection[Any, Any]:
        """Returns the connection to the child; starts it if it is not running, and waits until it is ready.

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

    def call(self, function: int, completion: Completion, time_limit: float, deadline: float = math.inf) -> Reply:
        """Returns the score of a completion, or why there is none; ends a call that takes too long.

        Args:
            time_limit: seconds of the call itself.
            deadline: on `time.monotonic`, of the call and of the start of a new child, if one is needed.
        """
        try:
            connection = self.start(deadline)
        except RunError as error:
            return Failure(kind="no process", reason=str(error))
        time_limit = min(time_limit, max(deadline - time.monotonic(), 0.0))
        try:
            connection.send((function, completion))
            if connection.poll(time_limit):
                return connection.recv()
        except (EOFError, OSError):
            return Failure(kind="end", reason=f"its process ended by {self.close()}")
        self.close()
        return Failure(kind="time", reason=f"it took longer than {time_limit:g} s, and was ended")

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
        """Sends the functions; returns why they cannot be loaded, or ""."""
        patience = None if math.isinf(deadline) else max(deadline - time.monotonic(), 0.0)
        try:
            connection.send(self._functions)
            return connection.recv() if connection.poll(patience) else "no time was left to load them"
        except (EOFError, OSError):
            return self.close()
