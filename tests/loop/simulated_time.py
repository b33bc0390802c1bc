"""Time of simulated runs, in place of the clock."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from megarl.cluster.calls import Awaited, Condition


class SimulatedTime:
    """Stands for the monitor of calls: who waits lets time pass, event by event."""

    def __init__(self) -> None:
        self.now = 0.0
        self.listeners: list[Callable[[], None]] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), event))

    def wait_until(self, awaited: Awaited) -> None:
        while not awaited.finished:
            assert self._events, "deadlock: nothing in progress could end the wait"
            self.now, _, event = heapq.heappop(self._events)
            event()
            for listener in self.listeners:
                listener()

    def work(self, seconds: float) -> None:
        """Lets the driver wait for so long."""
        done: list[bool] = []
        self.after(seconds, lambda: done.append(True))
        self.wait_until(Condition(lambda: bool(done)))
