"""The driver's event loop and its monitor in simulated time, in place of the clock."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, TypeVar

from megarl.cluster.calls import Call

T = TypeVar("T")


class SimulatedTime(asyncio.BaseEventLoop):
    """An event loop whose time passes when nothing is left to do, from event to event; its tasks begin at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.last = math.inf
        """A simulation that comes to this time has no end."""
        self._clock_resolution = 1e-9
        self._selector = SimpleNamespace(select=self._pass_time)
        self.set_task_factory(asyncio.eager_task_factory)

    def time(self) -> float:
        return self.now

    def after(self, seconds: float, event: Callable[[], object]) -> None:
        self.call_later(seconds, event)

    def _pass_time(self, seconds: float | None) -> list[object]:
        assert seconds is not None, "deadlock: nothing in progress could end the wait"
        self.now += seconds
        assert self.now < self.last, "no end"
        return []

    def _write_to_self(self) -> None:
        pass

    def _process_events(self, event_list: object) -> None:
        pass

    def create_task(self, *args: Any, **options: Any) -> asyncio.Task[Any]:
        """Makes a task that may be left unfinished, as those of a simulation that ends before."""
        task: Any = super().create_task(*args, **options)
        task._log_destroy_pending = False
        return task

    def __del__(self) -> None:
        """Has nothing to close."""


class SimulatedMonitor:
    """Stands for the monitor of calls, which others answer: it knows their time limits."""

    def __init__(self, clock: SimulatedTime) -> None:
        self.clock = clock
        self._failed = clock.create_future()

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = self.clock.create_task(work)
        task.add_done_callback(self._note)
        return task

    def follow[C: Call[Any]](self, call: C) -> C:
        call.ended = self.clock.create_future()
        return call

    def drive(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs work to its end, or to the first error of spawned work; what else is spawned goes on with the next."""

        async def until_done() -> T:
            task = self.spawn(work)
            await asyncio.wait([task, self._failed], return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
            return task.result()

        return self.clock.run_until_complete(until_done())

    def work(self, seconds: float) -> None:
        """Lets the driver wait for so long."""
        self.drive(asyncio.sleep(seconds))

    def _note(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and task.exception() is not None and not self._failed.done():
            self._failed.set_exception(task.exception())
            self._failed.exception()  # nobody may wait for it
