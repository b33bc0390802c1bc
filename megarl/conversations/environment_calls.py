"""Calls of environments in child processes; one that hangs or crashes makes its own conversation fail, and no other."""

from __future__ import annotations

import asyncio
import math
import pickle
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

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
    """

    def __init__(self, settings: EnvironmentSettings, memory: int | None = None) -> None:
        self.settings = settings
        self.memory = memory
        self.living: set[EnvironmentChild] = set()
        self.apart = asyncio.Semaphore(MAX_GROUPS)
        self._shared = EnvironmentChild(self, shared=True)

    async def start(self, seconds: float = math.inf) -> None:
        """Starts the shared process; a RunError if the environment cannot be loaded, or not in time."""
        await self._shared.start(time.monotonic() + seconds)

    @asynccontextmanager
    async def place(self, child: EnvironmentChild | None = None) -> AsyncGenerator[EnvironmentChild]:
        """The process of a conversation, None for the shared one; a RunError if the environment cannot be loaded."""
        if self._shared.ended or not self._shared.shared:
            self._shared = EnvironmentChild(self, shared=True)
        child = child or self._shared
        child.conversations += 1
        try:
            await child.start(time.monotonic() + _LOAD_S)
            yield child
        finally:
            child.conversations -= 1
            if not child.shared and not child.conversations:
                child.end()

    async def close(self) -> None:
        """Ends all processes; calls in progress never return."""
        await asyncio.gather(*(child.close() for child in self.living))
        self.living.clear()


class EnvironmentChild(ChildProcess):
    """A child process that has the environments of some conversations; a shared one takes further ones."""

    def __init__(self, children: EnvironmentChildren, *, shared: bool) -> None:
        settings = children.settings
        permit = None if shared else children.apart
        name = "megarl.conversations.environment_child"
        super().__init__(name, settings, "environments", children.memory, permit)
        self._children = children
        self._limit_s = settings.time_limit
        self.shared = shared
        self.conversations = 0

    async def start(self, deadline: float) -> None:
        """Starts the process unless it has started; a RunError if the environment is not loaded in time."""
        self._children.living.add(self)
        await super().start(deadline)

    async def call(self, conversation: int, method: Method, *args: Any) -> Reply:
        """Calls a method of a conversation's environment; a LostEnvironmentError if the process ends."""
        if self.ended:
            raise LostEnvironmentError("its process has ended")
        call = EnvironmentCall(conversation=conversation, method=method, args=args)
        answer = asyncio.ensure_future(self.request(call))
        try:
            # After a pause of this process, the answer may wait to be read.
            for seconds in (self._limit_s + _GRACE_S, _READ_S):
                await asyncio.wait((answer,), timeout=seconds)
            if not answer.done():
                limit = f"{_GRACE_S:g} s more than environment.time_limit = {self._limit_s:g} s"
                self.end(f"its process has not answered for {limit}: a method blocks it")
            reply: Reply | CallFailure = pickle.loads(await answer)
        finally:
            answer.cancel()
        if isinstance(reply, CallFailure):
            retired = [child for child in self._children.living if not child.shared]
            if reply.late and len(retired) < MAX_RETIRED:
                self.shared = False
            raise FailedEnvironmentError(reply.reason)
        return reply

    def lost(self, reason: str, calls: int) -> Sequence[LostEnvironmentError]:
        """Returns the errors of the calls in progress, with the processes in which their conversations begin anew."""
        self._children.living.discard(self)
        if calls:
            print(f"environments: {reason}; calls in progress: {calls}", flush=True)
        groups = [EnvironmentChild(self._children, shared=False) for _ in range(min(calls, MAX_GROUPS))]
        errors: list[LostEnvironmentError] = []
        for index in range(calls):
            errors.append(LostEnvironmentError(reason, alone=calls == 1, child=groups[index % MAX_GROUPS]))
        return errors
