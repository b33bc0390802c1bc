"""Calls of reward functions in a child process, several at a time where a function allows it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megarl.config.schema import RewardFunction
from megarl.errors import RunError
from megarl.rewards.adapters import CallMode, Failure, Reply
from megarl.rewards.child_process import ChildProcess, loop_in_thread
from megarl.rewards.completion import Completion

_CANCEL_S = 5.0
"""Time for a late coroutine to be canceled; then the process is killed, as the coroutine blocks its loop."""


@dataclass(kw_only=True)
class FunctionCall:
    """A call of the function with this index on some completions, with its last replies and its tries."""

    function: int
    completions: Sequence[Completion]
    replies: Sequence[Reply] = ()
    tries: int = field(default=0, init=False)

    def fail(self, kind: str, reason: str) -> None:
        self.replies = [Failure(kind=kind, reason=reason)] * len(self.completions)


class FunctionProcess:
    """A child process that calls reward functions, and is replaced when it has ended.

    Sequential functions are called first, one call at a time, in order. The others' calls overlap.
    If the process ends or must be ended with several calls in progress, those that were past their
    limit, or all if it ended by itself, have failed and are repeated one at a time; the others are
    made again, and the try does not count.

    Args:
        time_limit: seconds that a call may take.
        retries: further tries of a call that failed.
        memory: see `ChildProcess`.
    """

    def __init__(
        self, functions: Sequence[RewardFunction], time_limit: float, retries: int, memory: int | None = None
    ) -> None:
        self._time_limit = time_limit
        self._retries = retries
        self._loop: asyncio.AbstractEventLoop | None = None
        module = "megarl.rewards.reward_child"
        setup = tuple(functions)
        self._make_child = partial(ChildProcess, module, setup, "reward functions", memory)
        self._child = self._make_child()
        self._modes: Sequence[CallMode] = ()  # empty until the functions are loaded

    def _run[T](self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in the event loop of the child, a thread."""
        if self._loop is None:
            self._loop = loop_in_thread()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def start(self, deadline: float = math.inf) -> None:
        """Starts the process; a RunError if the functions cannot be loaded, or not by the deadline."""
        self._run(self._started(deadline))

    def make(self, calls: Sequence[FunctionCall], deadline: float) -> None:
        """Makes calls until each has scores, or its tries or the time (on `time.monotonic`) are used up."""
        self._run(self._make_all(calls, deadline))

    def close(self) -> None:
        if self._loop is not None:
            self._run(self._child.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None
            self._child = self._make_child()

    async def _started(self, deadline: float) -> ChildProcess:
        if self._child.ended:
            await self._child.over()
        if self._child.ended:  # no other call has replaced it meanwhile
            self._child = self._make_child()
        child = self._child
        self._modes = await child.start(deadline)
        return child

    async def _make_all(self, calls: Sequence[FunctionCall], deadline: float) -> None:
        if not self._modes:
            with suppress(RunError):  # every call fails by it
                await self._started(deadline)
        overlapping: list[FunctionCall] = []
        limits = [asyncio.Semaphore(mode.concurrency) for mode in self._modes]
        for call in calls:
            call.fail("deadline", "no time was left of cluster.time_limits.scoring")
            if limits and not self._modes[call.function].sequential:
                overlapping.append(call)
            else:
                await self._make(call, deadline)
        ended: list[FunctionCall] = []

        async def overlap(call: FunctionCall) -> None:
            async with limits[call.function]:
                if not await self._make(call, deadline, overlaps=True):
                    ended.append(call)

        await asyncio.gather(*map(overlap, overlapping))
        for call in ended:
            await self._make(call, deadline)

    async def _make(self, call: FunctionCall, deadline: float, *, overlaps: bool = False) -> bool:
        """Tries a call until it has scores; returns whether it did not end the process beside calls that overlap it."""
        while call.tries <= self._retries and time.monotonic() < deadline:
            process_lives = await self._try(call, deadline)
            if not all(isinstance(reply, Failure) for reply in call.replies):
                break
            if overlaps and not process_lives:
                return False
        return True

    async def _try(self, call: FunctionCall, deadline: float) -> bool:
        """Makes a call once, unless another call ends the process; returns whether the call did not end it."""
        try:
            child = await self._started(deadline)
        except RunError as error:
            call.tries += 1
            call.fail("no process", str(error))
            return False
        if child.ended:
            return True
        now = time.monotonic()
        seconds = min(self._time_limit, max(deadline - now, 0.0))
        is_async = self._modes[call.function].is_async
        until = min(now + seconds + is_async * _CANCEL_S, deadline)
        call.tries += 1
        try:
            async with asyncio.timeout(until - now):
                call.replies = await child.request((call.function, call.completions, seconds))
            return True
        except ConnectionError as error:
            if child.problem and time.monotonic() < until:  # another call has ended it
                call.tries -= 1
                return True
            if not child.problem:
                call.fail("end", str(error))
                return False
        except TimeoutError:
            child.end("a call took too long")
            await child.over()
        call.fail("time", f"it took longer than {seconds:g} s, and was ended")
        return False
