"""The child process that calls reward functions: plain ones in turn, others several at a time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from megarl.config.schema import RewardFunction
from megarl.rewards.adapters import BoundFunction, Failure, Reply, failed
from megarl.rewards.child_process import Loaded, loop_in_thread
from megarl.rewards.completion import Completion


def load(specs: Sequence[RewardFunction], connection: Connection[Any, Any]) -> Loaded:
    """Runs in the child: loads the functions, whose modes the parent gets."""
    host = _FunctionHost([BoundFunction(spec) for spec in specs], connection)
    return tuple(function.mode for function in host.functions), host.answer


class _FunctionHost:
    """Calls functions, each in its mode, and sends the replies."""

    def __init__(self, functions: Sequence[BoundFunction], connection: Connection[Any, Any]) -> None:
        self.functions = functions
        self._threads = [ThreadPoolExecutor(function.mode.concurrency) for function in functions]
        self._connection = connection
        self._sending = threading.Lock()
        # One of all async functions: clients with connections outlive calls.
        self._loop = loop_in_thread()

    def answer(self, number: int, call: tuple[int, Sequence[Completion], float]) -> None:
        """Makes a call; returns at once unless the function runs by itself."""
        index, completions, seconds = call
        function = self.functions[index]
        if function.mode.is_async:
            coroutine = self._await(number, function, completions, seconds)
            asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        elif function.mode.sequential:
            self._call(number, function, completions)
        else:
            self._threads[index].submit(self._call, number, function, completions)

    def _call(self, number: int, function: BoundFunction, completions: Sequence[Completion]) -> None:
        self._send(number, function.replies(completions))

    async def _await(
        self, number: int, function: BoundFunction, completions: Sequence[Completion], seconds: float
    ) -> None:
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                value = await function.call(completions)
            replies = function.read(value, len(completions))
        except BaseException as error:  # the user's own code, which must not end the loop
            replies = failed(error, len(completions))
            if limit.expired():
                late = Failure(kind="time", reason=f"it took longer than {seconds:g} s, and was cancelled")
                replies = [late] * len(completions)
        self._send(number, replies)

    def _send(self, number: int, replies: Sequence[Reply]) -> None:
        with self._sending:
            self._connection.send((number, replies))
