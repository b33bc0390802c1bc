"""Calls of environments in child processes; one that hangs or crashes makes its own conversation fail, and no other."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import pickle
import socket
import struct
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import Any, Final

from megarl.config.schema import EnvironmentSettings
from megarl.conversations.environment_child import CallFailure, EnvironmentCall, Method, Reply
from megarl.environments.environment import FailedEnvironmentError
from megarl.rewards.child_process import ChildProcess

_GRACE_S = 10.0
"""Time for a child to say that a call took too long; later its event loop hangs."""
_READ_S = 0.5
"""Time for an answer that has arrived to be read."""
_LOAD_S = 300.0
"""Time for a child that replaces another one to load the environment."""
MAX_GROUPS = 8
MAX_RETIRED = 8
"""Processes that take no further conversations; with more of them, a late call stays in its thread."""
_LENGTH: Final = struct.Struct("!i")
"""Length of a message, before it, as multiprocessing's connections write it."""


class LostEnvironmentError(FailedEnvironmentError):
    """An environment is gone with its process.

    Args:
        alone: whether no other conversation can have been the cause.
        child: process in which the conversation begins anew; None is the shared one.
    """

    def __init__(self, reason: str, *, alone: bool = False, child: EnvironmentChild | None = None) -> None:
        super().__init__(reason)
        self.alone = alone
        self.child = child


class EnvironmentChildren:
    """The child processes: one that all conversations share, and others for a while.

    A process in which a call took too long takes no further conversations, and ends with those that
    it has. Where a process ends by itself, or does not answer, one of the conversations with a call
    in progress was the cause: they begin anew in groups, each in a separate process, until the
    cause is alone. Methods are called in one event loop.

    Args:
        memory: limit of each process's memory, see `ChildProcess`.

    Attributes:
        living: processes that start or run.
        apart: permits for the processes of groups in progress.
    """

    def __init__(self, settings: EnvironmentSettings, memory: int | None = None) -> None:
        self.settings = settings
        self.memory = memory
        self.living: set[EnvironmentChild] = set()
        self.apart = asyncio.Semaphore(MAX_GROUPS)
        self._shared = EnvironmentChild(self, shared=True)

    async def start(self, seconds: float = math.inf) -> None:
        """Starts the shared process; a RunError if the environment cannot be loaded, or not in time."""
        await self._shared.start(seconds)

    @asynccontextmanager
    async def place(self, child: EnvironmentChild | None = None) -> AsyncGenerator[EnvironmentChild]:
        """The process of a conversation, None for the shared one; a RunError if the environment cannot be loaded."""
        if not self._shared.shared:
            self._shared = EnvironmentChild(self, shared=True)
        child = child or self._shared
        child.conversations += 1
        try:
            await child.start(_LOAD_S)
            yield child
        finally:
            child.conversations -= 1
            if not child.shared and not child.conversations:
                child.end()

    async def close(self) -> None:
        """Ends all processes; calls in progress never return."""
        await asyncio.gather(*(child.close() for child in self.living))


class EnvironmentChild:
    """A child process that has the environments of some conversations, and is started once.

    Attributes:
        shared: whether the process takes further conversations.
        conversations: number of conversations in the process.
    """

    def __init__(self, children: EnvironmentChildren, *, shared: bool) -> None:
        self._children = children
        self._limit_s = children.settings.time_limit
        self._process = ChildProcess(
            "megarl.conversations.environment_child", children.settings, "environments", children.memory
        )
        self.shared = shared
        self.conversations = 0
        self._permit = nullcontext() if shared else children.apart
        self._living: asyncio.Task[None] | None = None
        self._loaded: asyncio.Future[None]
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[bytes]] = {}
        self._problem: str | None = None
        self._ended = False
        self._writer: asyncio.StreamWriter

    async def start(self, seconds: float) -> None:
        """Starts the process unless it has started; a RunError if the environment is not loaded in time."""
        if self._living is None:
            self._loaded = asyncio.get_running_loop().create_future()
            self._living = asyncio.create_task(self._live(seconds))
            self._children.living.add(self)
        await asyncio.shield(self._loaded)

    async def call(self, conversation: int, method: Method, *args: Any) -> Reply:
        """Calls a method of a conversation's environment.

        Raises:
            FailedEnvironmentError: it failed or took too long.
            LostEnvironmentError: the process has ended.
        """
        if self._ended:
            raise LostEnvironmentError("its process has ended")
        number = next(self._numbers)
        loop = asyncio.get_running_loop()
        call = EnvironmentCall(number=number, conversation=conversation, method=method, args=args)
        message = pickle.dumps(call)
        answer = self._calls[number] = loop.create_future()
        # Twice: after a pause of this process, the answer may wait to be read.
        limit_s = self._limit_s + _GRACE_S
        patience = loop.call_later(limit_s, loop.call_later, _READ_S, self._give_up, answer)
        try:
            self._writer.write(_LENGTH.pack(len(message)) + message)
            reply: Reply | CallFailure = pickle.loads(await answer)
        finally:
            patience.cancel()
            del self._calls[number]
        if isinstance(reply, CallFailure):
            retired = [child for child in self._children.living if not child.shared]
            if reply.late and len(retired) < MAX_RETIRED:
                self.shared = False
            raise FailedEnvironmentError(reply.reason)
        return reply

    def end(self) -> None:
        """Ends a process that runs; returns at once."""
        if self._loaded.done() and self._loaded.exception() is None:
            self._writer.transport.abort()

    async def close(self) -> None:
        """Ends the process; calls in progress never return."""
        assert self._living is not None
        self._living.cancel()
        await asyncio.wait((self._living,))

    async def _live(self, seconds: float) -> None:
        """Starts the process, hands out answers until it ends, and fails the calls in progress."""
        status = ""
        try:
            async with self._permit:
                try:
                    # In a thread that stays: a child ends with the thread that has started it.
                    deadline = time.monotonic() + seconds
                    connection = await asyncio.to_thread(self._process.start, deadline)
                    ours = socket.socket(fileno=os.dup(connection.fileno()))
                    reader, self._writer = await asyncio.open_connection(sock=ours)
                    self._loaded.set_result(None)
                    await self._receive(reader)
                finally:
                    self.shared = False
                    self._ended = True
                    self.end()
                    status = await asyncio.to_thread(self._process.close)
        except Exception as error:
            if self._loaded.done():
                status = repr(error)
            else:  # it cannot be started
                self._loaded.set_exception(error)
        finally:
            self._children.living.discard(self)
        self._fail_calls(status)

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        with suppress(Exception):  # it has ended, or sent what is no answer
            while True:
                (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                number, reply = pickle.loads(await reader.readexactly(length))
                answer = self._calls.get(number)
                if answer is not None and not answer.done():
                    answer.set_result(reply)

    def _fail_calls(self, status: str) -> None:
        reason = self._problem or f"its process ended with {status}"
        lost = [answer for answer in self._calls.values() if not answer.done()]
        if lost:
            print(f"environments: {reason}; calls in progress: {len(lost)}", flush=True)
        groups = [EnvironmentChild(self._children, shared=False) for _ in lost[:MAX_GROUPS]]
        for index, answer in enumerate(lost):
            child = groups[index % MAX_GROUPS]
            error = LostEnvironmentError(reason, alone=len(lost) == 1, child=child)
            answer.set_exception(error)

    def _give_up(self, answer: asyncio.Future[bytes]) -> None:
        """Ends a process that does not even say that a call took too long."""
        if answer.done():
            return
        limit = f"{_GRACE_S:g} s more than environment.time_limit = {self._limit_s:g} s"
        self._problem = f"its process has not answered for {limit}: a method blocks it"
        self.end()
