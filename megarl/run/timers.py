"""Clocks of a run and of the phases of a step."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def process_age() -> float:
    """Returns the seconds since this process started: the clock of a run that this process has not restarted."""
    with open("/proc/self/stat", encoding="utf-8") as file:
        started = int(file.read().rpartition(")")[2].split()[19])  # after the name: the fields from the third on
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def stopwatch() -> Callable[[], float]:
    """Returns a clock that starts now."""
    start = time.monotonic()
    return lambda: time.monotonic() - start


class Timers:
    """Sums seconds by phase: `with timers("rollout"): ...`. `entered` gets each name."""

    def __init__(
        self, entered: Callable[[str], None] | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._entered = entered
        self._clock = clock
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        if self._entered is not None:
            self._entered(phase)
        start = self._clock()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + self._clock() - start

    def take(self) -> dict[str, float]:
        """Returns the seconds of each phase as `time/PHASE`, and resets them."""
        taken = {f"time/{phase}": seconds for phase, seconds in self._seconds.items()}
        self._seconds.clear()
        return taken
