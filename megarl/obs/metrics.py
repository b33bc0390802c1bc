"""Where the metrics of each step go: a file of JSON lines, a table on the console."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console

Metrics = Mapping[str, float]


class Sink(Protocol):
    """Anything that takes the metrics of a step."""

    def write(self, step: int, metrics: Metrics) -> None:
        """Takes the metrics of one step; steps come in rising order."""
        ...


class JsonlSink:
    """Writes one JSON object per step, ``step`` first, and flushes it; starts the file anew.

    JSON has no number that is not finite: it is written as null.

    Args:
        path: the file; its directory is made.
    """

    def __init__(self, path: str | Path) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115  the sink is the context manager

    def write(self, step: int, metrics: Metrics) -> None:
        """Appends the object of one step."""
        line = {"step": step, **{name: _json_number(value) for name, value in metrics.items()}}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ConsoleSink:
    """Prints a row per step under a heading; a metric that a step lacks is a dash.

    Args:
        columns: heading by metric name, in the order of the columns.
        steps: the run's number of steps.
        console: where to print.
    """

    _WIDTH = 10

    def __init__(self, columns: Mapping[str, str], *, steps: int, console: Console | None = None) -> None:
        self._columns = dict(columns)
        self._steps = steps
        self._console = console or Console(highlight=False)
        self._headed = False

    def write(self, step: int, metrics: Metrics) -> None:
        """Prints the row of one step, after the heading if it is the first."""
        widths = {name: max(self._WIDTH, len(heading)) for name, heading in self._columns.items()}
        if not self._headed:
            headings = (heading.rjust(widths[name]) for name, heading in self._columns.items())
            self._print(" ".join(["step".rjust(self._WIDTH), *headings]), "bold")
            self._headed = True
        values = (_short(metrics.get(name)).rjust(widths[name]) for name in self._columns)
        self._print(" ".join([f"{step}/{self._steps}".rjust(self._WIDTH), *values]), None)

    def _print(self, line: str, style: str | None) -> None:
        self._console.print(line, style=style, markup=False, soft_wrap=True)


def _json_number(value: float) -> float | None:
    number = value if isinstance(value, int) else float(value)
    return number if math.isfinite(number) else None


def _short(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.4g}"
