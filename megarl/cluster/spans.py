"""What a process does and when, for the trace of the run."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Final

WAIT: Final = "wait"
_LEAST_S = 1e-4


@dataclass(frozen=True, kw_only=True)
class Span:
    """Something that a process did, or `WAIT`; times are seconds since 1970."""

    name: str
    start: float
    end: float


class SpanLog:
    """The spans of a process, one after the other. One thread adds them, and any thread takes them.

    Neighbours with the same name are one span. Spans below 0.1 ms are left out.
    """

    def __init__(self) -> None:
        self._epoch = time.time() - time.perf_counter()
        self._ended: deque[Span] = deque()
        self._name = ""
        self._start = self._end = time.perf_counter()

    def add(self, name: str, start: float, end: float) -> None:
        """Adds a span; both times are those of `time.perf_counter`."""
        if name != self._name or start - self._end > _LEAST_S:
            self.close()
            self._note(WAIT, self._end, start)
            self._name = name
            self._start = start
        self._end = end

    def close(self) -> None:
        """Ends the last span, so that it can be taken."""
        self._note(self._name, self._start, self._end)
        self._name = ""
        self._start = self._end

    def take(self) -> tuple[Span, ...]:
        """Returns the spans that have ended, once."""
        return tuple(self._ended.popleft() for _ in range(len(self._ended)))

    def _note(self, name: str, start: float, end: float) -> None:
        if end - start > _LEAST_S:
            self._ended.append(Span(name=name, start=self._epoch + start, end=self._epoch + end))
