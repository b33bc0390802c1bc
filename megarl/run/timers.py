"""How long the stages of a step take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Timers:
    """Collects seconds by stage: ``with timers("rollout"): ...``; a stage that comes twice is added up.

    Args:
        entered: is told of every stage that begins.
        clock: seconds that only rise.
    """

    def __init__(
        self, entered: Callable[[str], None] | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._entered = entered
        self._clock = clock
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        if self._entered is not None:
            self._entered(stage)
        start = self._clock()
        try:
            yield
        finally:
            self._seconds[stage] = self._seconds.get(stage, 0.0) + self._clock() - start

    def take(self) -> dict[str, float]:
        """The seconds of each stage as ``time/STAGE``, and starts from zero."""
        taken = {f"time/{stage}": seconds for stage, seconds in self._seconds.items()}
        self._seconds.clear()
        return taken
