"""A child process that runs code of the user and can always be ended: the parent's side, and how the child begins."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import math
import os
import pickle
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from megarl.errors import RunError
from megarl.stacks import answer_as_child

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PROGRAM = (
    "import sys; sys.path[:] = {path};"
    " from megarl.rewards.child_process import become_supervised, serve;"
    " become_supervised({parent}, {descriptor}, {memory});"
    " from {module} import load; serve({descriptor}, {part!r}, load)"
)
_LENGTH = struct.Struct("!i")
"""Length of a message, before it, as multiprocessing's connections write it."""
_REAP_S = 10.0
"""Time for a killed process to end; one that hangs in the kernel is left behind until the run ends."""


class ChildProcess:
    """A child process that runs code of the user, and can always be ended; it is started once.

    Such code may hang in C code, in a sleep, or in a program that it runs, and only the end of its
    process is sure to stop it. All that a process has started ends with it, also daemons: see
    `become_supervised`. A message to the child is (number, call), its answer (number, reply). Where
    the child ends, all calls in progress fail. Methods are called in one event loop.

    Args:
        module: module whose function `load` runs in the child, see `serve`.
        setup: what `load` gets.
        name: name of what the child loads, for messages.
        memory: bytes of data of the child, and of each process that it starts; None is no limit.
        permit: what must be held while the child lives.

    Attributes:
        ended: whether the child takes no call any more.
        problem: why it was ended from here; empty if it ended by itself.
    """

    def __init__(
        self,
        module: str,
        setup: object,
        name: str,
        memory: int | None = None,
        permit: AbstractAsyncContextManager[object] | None = None,
    ) -> None:
        self._module = module
        self._setup = setup
        self._name = name
        self._memory = memory
        self._permit = permit or nullcontext()
        self._living: asyncio.Task[None] | None = None
        self._loaded: asyncio.Future[Any]
        self._writer: asyncio.StreamWriter | None = None
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.ended = False
        self.problem = ""

    async def start(self, deadline: float = math.inf) -> Any:
        """Starts the child, once, and returns what it loads; a RunError if it does not by the deadline."""
        if self._living is None:
            self._loaded = asyncio.get_running_loop().create_future()
            self._living = asyncio.create_task(self._live(deadline))
        return await asyncio.shield(self._loaded)

    async def request(self, call: object) -> Any:
        """Returns the reply to a call of a child that has not ended; raises an error of `lost` where it ends."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            self._send((number, call))
            return await answer
        finally:
            del self._answers[number]

    def lost(self, reason: str, calls: int) -> Sequence[Exception]:
        """Returns the errors of the calls in progress."""
        return [ConnectionError(reason) for _ in range(calls)]

    def end(self, problem: str = "") -> None:
        """Ends the child if it runs; returns at once."""
        self.ended = True
        self.problem = self.problem or problem
        if self._writer is not None:
            self._writer.transport.abort()

    async def over(self) -> None:
        """Returns when the child has ended, or at once if it was never started."""
        if self._living is not None:
            await asyncio.wait((self._living,))

    async def close(self) -> None:
        """Ends the child; calls in progress never return."""
        if self._living is not None:
            self._living.cancel()
        await self.over()

    async def _live(self, deadline: float) -> None:
        """Starts the child, hands out answers until it ends, and fails the calls in progress."""
        status = ""
        try:
            async with self._permit:
                # In a thread that stays: a child ends with the thread that has started it.
                launching = asyncio.create_task(asyncio.to_thread(self._launch))
                try:
                    _, ours = await asyncio.shield(launching)
                    reader, self._writer = await asyncio.open_connection(sock=ours)
                    await self._receive(reader, deadline)
                finally:
                    process, _ = await launching
                    self.end()
                    status = await asyncio.to_thread(_ended, process)
        except Exception as error:
            self.ended = True
            status = repr(error)
            if not self._loaded.done():
                self._loaded.set_exception(error)
        if not self._loaded.done():
            problem = f"{self._name}: their process cannot start: {self.problem or status}"
            self._loaded.set_exception(RunError(problem))
        answers = [answer for answer in self._answers.values() if not answer.done()]
        errors = self.lost(self.problem or f"its process ended by {status}", len(answers))
        for answer, error in zip(answers, errors, strict=True):
            answer.set_exception(error)

    async def _receive(self, reader: asyncio.StreamReader, deadline: float) -> None:
        """Hands out what is loaded, and answers."""
        with suppress(Exception):  # it has ended, or sent what is no answer
            self._send(self._setup)
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    loaded = await _read(reader)
            except TimeoutError:
                loaded = "no time was left to load them"
            if isinstance(loaded, str):
                self.problem = loaded
                return
            self._loaded.set_result(loaded)
            while True:
                number, reply = await _read(reader)
                answer = self._answers.get(number)
                if answer is not None and not answer.done():
                    answer.set_result(reply)

    def _send(self, message: object) -> None:
        assert self._writer is not None
        data = pickle.dumps(message)
        self._writer.write(_LENGTH.pack(len(data)) + data)

    def _launch(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair()
        with theirs:
            program = _PROGRAM.format(
                path=repr(sys.path),
                module=self._module,
                descriptor=theirs.fileno(),
                part=self._name.rpartition(" ")[2],
                parent=os.getpid(),
                memory=self._memory,
            )
            process = subprocess.Popen(
                [sys.executable, "-u", "-c", program],  # unbuffered: output survives a kill
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        return process, ours


async def _read(reader: asyncio.StreamReader) -> Any:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(length))


def _ended(process: subprocess.Popen[bytes]) -> str:
    """Ends a child and the programs that it has started; returns how it ended."""
    process.terminate()
    try:
        return how_ended(process.wait(_REAP_S))
    except subprocess.TimeoutExpired:
        process.kill()
        return "nothing: it hangs in the kernel"


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

    The supervisor ends when the child ends, when the parent's thread that started it does, or at
    SIGTERM, and first kills all descendants: the kernel gives it also those whose parents have
    ended, whatever their group, session or environment. It ends as the child did.
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


Loaded = tuple[object, Callable[[int, Any], object]]
"""What a child has loaded, for the parent, and what takes the numbers and contents of calls."""


def serve(descriptor: int, part: str, load: Callable[[Any, Connection[Any, Any]], Loaded]) -> None:
    """Runs in the child until the parent closes the connection.

    Args:
        part: part of the parent's name, for stacks.
        load: function that loads the parent's setup; the problem is the text of its ValueError. It
            gets the connection, on which calls are answered.
    """
    answer_as_child(part)
    os.set_inheritable(descriptor, False)  # programs that the user's code starts must not keep it open
    with Connection(descriptor) as connection:
        setup = connection.recv()
        try:
            loaded, answer = load(setup, connection)
        except ValueError as error:
            connection.send(str(error))
            return
        connection.send(loaded)
        while True:
            try:
                number, call = connection.recv()
            except EOFError:
                return
            answer(number, call)


def loop_in_thread() -> asyncio.AbstractEventLoop:
    """Returns an event loop that runs in a thread."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop
