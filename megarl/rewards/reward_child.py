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
from megarl.rewards.child_process import parent_connection, received
from megarl.rewards.completion import Completion


def serve(descriptor: int) -> None:
    """Runs in the child: receives the functions, sends their modes, or a problem as text, and answers calls."""
    with parent_connection(descriptor, "functions") as connection:
        specs: Sequence[RewardFunction] = connection.recv()
        try:
            functions = [BoundFunction(spec) for spec in specs]
        except ValueError as error:
            connection.send(str(error))
            return
        connection.send(tuple(function.mode for function in functions))
        loop = asyncio.new_event_loop()  # of all async functions: clients with connections outlive calls
        threading.Thread(target=loop.run_forever, daemon=True).start()
        callers = [_Caller(function, connection, loop) for function in functions]
        for number, (function, completions, seconds) in received(connection):
            callers[function].answer(number, completions, seconds)


class _Caller:
    """Calls one function in its mode, and sends the replies."""

    _sending = threading.Lock()

    def __init__(
        self, function: BoundFunction, connection: Connection[Any, Any], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._function = function
        self._connection = connection
        self._loop = loop
        self._threads = ThreadPoolExecutor(function.mode.concurrency)

    def answer(self, number: int, completions: Sequence[Completion], seconds: float) -> None:
        """Makes a call; returns at once unless the function runs by itself."""
        if self._function.mode.is_async:
            call = self._await(number, completions, seconds)
            asyncio.run_coroutine_threadsafe(call, self._loop)
        elif self._function.mode.sequential:
            self._send(number, self._function.replies(completions))
        else:
            self._threads.submit(lambda: self._send(number, self._function.replies(completions)))

    async def _await(self, number: int, completions: Sequence[Completion], seconds: float) -> None:
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                value = await self._function.call(completions)
            replies = self._function.read(value, len(completions))
        except BaseException as error:  # the user's own code, which must not end the loop
            replies = failed(error, len(completions))
            if limit.expired():
                late = Failure(kind="time", reason=f"it took longer than {seconds:g} s, and was cancelled")
                replies = [late] * len(completions)
        self._send(number, replies)

    def _send(self, number: int, replies: Sequence[Reply]) -> None:
        with self._sending:
            self._connection.send((number, replies))
