"""Calls of reward functions in a child process, several at a time where a function allows it."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from megarl.config.schema import RewardFunction
from megarl.errors import RunError
from megarl.rewards.adapters import CallMode, Failure, Reply
from megarl.rewards.child_process import ChildProcess, LostChildError
from megarl.rewards.completion import Completion

_CANCEL_S = 5.0
"""Time for a late coroutine to be canceled; then the process is killed, as the coroutine blocks its loop."""


class FunctionProcess:
    """A child process that calls reward functions, and is replaced when it has ended.

    Attributes:
        modes: the functions' modes; empty until they are loaded.
    """

    def __init__(self, functions: Sequence[RewardFunction], memory: int | None = None) -> None:
        self._functions = tuple(functions)
        self._memory = memory
        self._loop: asyncio.AbstractEventLoop | None = None
        self._child: ChildProcess | None = None
        self.modes: tuple[CallMode, ...] = ()

    def run[T](self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in the event loop of the child, a thread."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, daemon=True).start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def start(self, deadline: float = math.inf) -> None:
        """Starts the process; a RunError if the functions cannot be loaded, or not by the deadline."""
        self.run(self.child(deadline))

    async def child(self, deadline: float) -> ChildProcess:
        """Returns the child, a new one if there is none; see `start`."""
        if self._child is not None and self._child.ended:
            await self._child.over()
        if self._child is None or self._child.ended:
            name = "megarl.rewards.reward_child"
            self._child = ChildProcess(name, self._functions, "reward functions", self._memory)
        child = self._child
        self.modes = await child.start(deadline)
        return child

    def close(self) -> None:
        if self._child is not None and self._loop is not None:
            self.run(self._child.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._child = None
            self._loop = None


@dataclass(frozen=True, kw_only=True)
class FunctionCall:
    """A call of the function with this index on some completions."""

    function: int
    completions: Sequence[Completion]


class CallQueue:
    """Makes calls until each has scores, or its tries or the time are used up.

    Sequential functions are called first, one call at a time, in order. The others' calls overlap.
    If the process ends or must be ended with several calls in progress, those that were past their
    limit, or all if it ended by itself, have failed and are repeated one at a time; the others are
    made again, and the try does not count.

    Args:
        time_limit: seconds that a call may take.
        retries: further tries of a call that failed.
        deadline: end of all calls, on `time.monotonic`.
    """

    def __init__(
        self,
        process: FunctionProcess,
        calls: Sequence[FunctionCall],
        *,
        time_limit: float,
        retries: int,
        deadline: float,
    ) -> None:
        self._process = process
        self._calls = calls
        self._time_limit = time_limit
        self._retries = retries
        self._deadline = deadline
        late = Failure(kind="deadline", reason="no time was left of cluster.time_limits.scoring")
        self._replies: list[Sequence[Reply]] = [[late] * len(call.completions) for call in calls]
        self._tries = [0] * len(calls)
        self._blamed: list[int] = []  # calls with which the process ended while others may have been in progress

    def run(self) -> list[tuple[Sequence[Reply], int]]:
        """Makes all calls; returns for each a reply per completion, failures being the last ones, and its tries."""
        self._process.run(self._run())
        return list(zip(self._replies, self._tries, strict=True))

    async def _run(self) -> None:
        if not self._process.modes:
            with suppress(RunError):  # every call fails by it
                await self._process.child(self._deadline)
        overlapping: list[int] = []
        limits = [asyncio.Semaphore(mode.concurrency) for mode in self._process.modes]
        for number, call in enumerate(self._calls):
            if limits and not self._process.modes[call.function].sequential:
                overlapping.append(number)
            else:
                await self._make(number)

        async def make(number: int) -> None:
            async with limits[self._calls[number].function]:
                await self._make(number, overlaps=True)

        await asyncio.gather(*map(make, overlapping))
        for number in self._blamed:
            await self._make(number)

    async def _make(self, number: int, *, overlaps: bool = False) -> None:
        """Tries a call until it has scores; one that overlaps others is left to `_blamed` when its process ends."""
        call = self._calls[number]
        while self._tries[number] <= self._retries and time.monotonic() < self._deadline:
            self._tries[number] += 1
            replies = await self._try(call)
            if replies is None:
                self._tries[number] -= 1
                continue
            ended = isinstance(replies, Failure)
            if isinstance(replies, Failure):
                replies = [replies] * len(call.completions)
            self._replies[number] = replies
            if not all(isinstance(reply, Failure) for reply in replies):
                return
            if ended and overlaps:
                self._blamed.append(number)
                return

    async def _try(self, call: FunctionCall) -> Sequence[Reply] | Failure | None:
        """Makes a call; a failure where there is no process any more, None where another call has ended it."""
        try:
            child = await self._process.child(self._deadline)
        except RunError as error:
            return Failure(kind="no process", reason=str(error))
        if child.ended:
            return None
        now = time.monotonic()
        seconds = min(self._time_limit, max(self._deadline - now, 0.0))
        is_async = self._process.modes[call.function].is_async
        until = min(now + seconds + is_async * _CANCEL_S, self._deadline)
        try:
            async with asyncio.timeout(until - now):
                return await child.request((call.function, call.completions, seconds))
        except LostChildError as error:
            if not child.problem:
                return Failure(kind="end", reason=str(error))
            if time.monotonic() < until:
                return None
        except TimeoutError:
            child.end("a call took too long")
            await child.over()
        return Failure(kind="time", reason=f"it took longer than {seconds:g} s, and was ended")
