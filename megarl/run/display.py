"""How far a run is, for whoever watches it: a live display in a terminal, a row per step elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from megarl.run.sinks import ConsoleSink, Metrics, Sink, short

_REFRESHES_PER_S = 2
_SPEED_OVER_S = 86400.0
"""Past that the time that is left is estimated from: steps may take an hour."""


class Display(Sink, Protocol):
    """A sink for people."""

    def phase(self, name: str) -> None:
        """Says what a step is doing now."""
        ...


def open_display(
    title: str, columns: Mapping[str, str], *, steps: int, done: int = 0, console: Console | None = None
) -> Display:
    """What suits the console.

    Args:
        title: of the run's stage.
        columns: metrics to show: their headings by name, in order.
        steps: of the run.
        done: steps that were taken before, by a run that this one continues.
        console: where to show them; None is standard output.
    """
    console = console or Console(highlight=False)
    if console.is_terminal:
        return ProgressSink(title, columns, steps=steps, done=done, console=console)
    return ConsoleSink(columns, steps=steps, console=console)


class ProgressSink:
    """A bar over the steps, what the present one is doing, and the metrics of the last; stays on the screen at the end.

    A thread of its own draws it. What the program prints meanwhile appears above it.

    Args:
        title, columns, steps, done, console: see open_display.
    """

    def __init__(self, title: str, columns: Mapping[str, str], *, steps: int, done: int, console: Console) -> None:
        self._columns = dict(columns)
        self._metrics: Metrics = {}
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[phase]}", style="dim"),
            console=console,
            speed_estimate_period=_SPEED_OVER_S,
        )
        self._task = self._bar.add_task(title, total=steps, completed=done, phase="")
        self._live = Live(
            console=console,
            get_renderable=self._rendered,
            refresh_per_second=_REFRESHES_PER_S,
            vertical_overflow="visible",
        )
        self._live.start()

    def phase(self, name: str) -> None:
        """Shows it beside the bar."""
        self._bar.update(self._task, phase=name)

    def write(self, step: int, metrics: Metrics) -> None:
        """Moves the bar and shows the metrics."""
        self._metrics = metrics
        self._bar.update(self._task, completed=step)

    def close(self) -> None:
        """Draws it a last time and gives the terminal back."""
        self._bar.update(self._task, phase="")
        self._live.stop()

    def _rendered(self) -> RenderableType:
        shown = [
            Text.assemble((f"{heading} ", "dim"), short(self._metrics[name]))
            for name, heading in self._columns.items()
            if name in self._metrics
        ]
        return Group(self._bar.get_renderable(), Columns(shown, padding=(0, 3)))
