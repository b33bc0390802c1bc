"""Sinks of metrics: the protocol, and files of JSON lines."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, Final, Protocol

Metrics = Mapping[str, float]

WRITTEN: Final = "time/written"
"""The time of writing in each line, seconds since 1970."""


class Sink(Protocol):
    """A receiver of the metrics of each step."""

    def write(self, step: int, metrics: Metrics) -> None:
        """Writes the metrics of a step; steps come in ascending order."""
        ...

    def close(self) -> None:
        """Writes what is pending and releases everything."""
        ...


class JsonLines:
    """Appends JSON objects to a file, one a line, each flushed. Numbers that are not finite become null.

    Args:
        path: of the file, whose directory is created.
    """

    def __init__(self, path: str | Path) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115  closed by close

    def write(self, entries: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(as_json(entries), allow_nan=False, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class JsonlSink:
    """Appends the metrics of each step to a file of JSON lines: `step` first, the time of writing last.

    Args:
        clock: seconds since 1970.
    """

    def __init__(self, path: str | Path, clock: Callable[[], float] = time.time) -> None:
        self._lines = JsonLines(path)
        self._clock = clock

    def write(self, step: int, metrics: Metrics) -> None:
        self._lines.write({"step": step, **metrics, WRITTEN: self._clock()})

    def close(self) -> None:
        self._lines.close()


def as_json(value: Any) -> Any:
    """Returns a value as JSON has it: numpy's numbers as plain ones, numbers that are not finite as null."""
    if isinstance(value, Mapping):
        return {str(name): as_json(entry) for name, entry in value.items()}
    if isinstance(value, bool | str) or value is None:
        return value
    if isinstance(value, Sequence):
        return [as_json(entry) for entry in value]
    if isinstance(value, Integral):
        return int(value)
    return float(value) if math.isfinite(value) else None
