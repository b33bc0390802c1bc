"""The phases of each process of a run, from its trace, at the resolution of a screen."""

from __future__ import annotations

import re
from bisect import bisect_right
from itertools import chain
from typing import Any

from megarl.files import JsonObject, LineFollower
from megarl.run.paths import RunPaths

_STEP = re.compile(r"step \d+")
_NUMBER = re.compile(r"(\d+)")
_LONGEST_LISTED = 6

TraceSpan = tuple[float, float, str]
"""Start and end, seconds from the start of the first attempt, and name."""

RowKey = tuple[int, int]
"""Attempt, and number of the process in it; -1 are the steps."""


class Timeline:
    """Follows the trace of a run."""

    def __init__(self, run: RunPaths) -> None:
        self._parts = [LineFollower(path) for path in (run.earlier_trace, run.trace)]
        self._clear()

    def _clear(self) -> None:
        self._names: dict[RowKey, str] = {}
        self._spans: dict[RowKey, list[TraceSpan]] = {}
        self.end = 0.0

    def update(self) -> None:
        """Reads what has been written since the last call."""
        if any(part.was_cut() for part in self._parts):  # a full trace becomes the earlier one
            for part in self._parts:
                part.rewind()
            self._clear()
        for _, event in chain.from_iterable(part.read() for part in self._parts):
            row = (event.get("pid", 1), event.get("tid", 0))
            if event.get("name") == "thread_name":
                self._names.setdefault(row, event["args"]["name"])
            elif event.get("ph") == "X":
                start = event["ts"] / 1e6
                end = start + event["dur"] / 1e6
                if _STEP.fullmatch(event["name"]):
                    row = (row[0], -1)
                    self._names.setdefault(row, "step")
                self._spans.setdefault(row, []).append((start, end, event["name"]))
                self.end = max(self.end, end)

    def window(self, start: float, end: float, columns: int) -> JsonObject:
        """Returns the rows between two times in seconds; spans shorter than a column of the screen are joined.

        Raises:
            ValueError: there is no time or no column between.
        """
        if not self.end:
            return {"start": 0.0, "end": 0.0, "whole": 0.0, "rows": []}
        if start >= end or columns < 1:
            raise ValueError(f"{start} to {end} in {columns} columns: a range of times, and one column at least")
        rows: list[JsonObject] = []
        for row in sorted(self._spans, key=self._place):
            spans = self._spans[row]
            spans.sort()
            first = max(0, bisect_right(spans, (start,)) - 1)
            seen = [span for span in spans[first : bisect_right(spans, (end,))] if span[1] > start]
            if not seen:
                continue
            seconds: dict[str, float] = {}
            for span_start, span_end, name in seen:
                seconds[name] = seconds.get(name, 0.0) + min(span_end, end) - max(span_start, start)
            rows.append(
                {
                    "attempt": row[0],
                    "name": self._names.get(row, "?"),
                    "spans": _joined(seen, (end - start) / columns),
                    "seconds": sorted(seconds.items(), key=lambda item: -item[1])[:_LONGEST_LISTED],
                }
            )
        return {"start": start, "end": end, "whole": self.end, "rows": rows}

    def _place(self, row: RowKey) -> tuple[Any, ...]:
        """Orders rows: the steps, the driver, then by name, rank 2 before rank 10."""
        parts: list[Any] = _NUMBER.split(self._names.get(row, "?"))
        parts[1::2] = map(int, parts[1::2])
        return row[0], min(row[1], 1), parts


def _joined(spans: list[TraceSpan], min_s: float) -> list[TraceSpan]:
    """Returns the spans of at least `min_s`; shorter neighbors are one, named after the longest."""
    joined: list[TraceSpan] = []
    longest = 0.0  # among the spans that the last one was joined from; 0 if it is long by itself
    for start, end, name in spans:
        seconds = end - start
        if longest and seconds < min_s and end - joined[-1][0] < min_s:
            first, _, before = joined.pop()
            joined.append((first, round(end, 6), name if seconds > longest else before))
            longest = max(longest, seconds)
        else:
            joined.append((round(start, 6), round(end, 6), name))
            longest = seconds if seconds < min_s else 0.0
    return joined
