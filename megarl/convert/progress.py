"""How far a conversion is: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from megarl.convert.memory import shown_bytes

_LINE_EVERY_S = 10.0


class Meter:
    """Counts bytes.

    Args:
        title: what is done.
        total: bytes of all of it.
        console: where to show it; None is standard error.
    """

    def __init__(self, title: str, total: int, console: Console | None = None) -> None:
        self._title, self._total, self._done = title, total, 0
        self._console = console or Console(stderr=True, highlight=False)
        self._began = self._said = time.monotonic()
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
            self._bar = Progress(TextColumn("[bold]{task.description}"), *columns, console=self._console)
            self._task = self._bar.add_task(self._title, total=self._total)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def skip(self, nbytes: int) -> None:
        """Counts what was done before."""
        if nbytes:
            self._console.print(f"{self._title}: {shown_bytes(nbytes)} are there already")
        self.advance(nbytes)

    def advance(self, nbytes: int) -> None:
        """Counts what is done."""
        self._done += nbytes
        if self._bar is not None:
            self._bar.advance(self._task, nbytes)
        elif self._done == self._total or time.monotonic() - self._said >= _LINE_EVERY_S:
            self._said = time.monotonic()
            share = 100 * self._done // max(1, self._total)
            rate = shown_bytes(self._done / max(1e-3, self._said - self._began))
            done, total = shown_bytes(self._done), shown_bytes(self._total)
            self._console.print(f"{self._title}: {done} of {total} ({share}%), {rate}/s")
