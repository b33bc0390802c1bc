"""Metrics for people: a live display in a terminal, a row per step elsewhere, tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from typing import Any, Final, Protocol

from rich import box
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from megarl.run.sinks import Metrics, Sink
from megarl.run.timers import process_age


@dataclass(frozen=True, kw_only=True)
class Column:
    """A metric that is shown of every step; below its heading is the unit, or the limit of healthy values."""

    heading: str
    unit: str = ""


COLUMNS: Final[Mapping[str, Column]] = {
    "sft/loss": Column(heading="loss", unit="nats"),
    "sft/lr": Column(heading="lr"),
    "sft/grad_norm": Column(heading="grad norm"),
    "reward_model/loss": Column(heading="loss", unit="nats"),
    "reward_model/accuracy": Column(heading="accuracy"),
    "reward_model/lr": Column(heading="lr"),
    "reward_model/grad_norm": Column(heading="grad norm"),
    "objective/score": Column(heading="score"),
    "objective/kl": Column(heading="KL", unit="nats"),
    "select/score": Column(heading="selected"),
    "response_length/mean": Column(heading="length", unit="tokens"),
    "truncated_fraction": Column(heading="truncated"),
    "group/zero_std_fraction": Column(heading="zero std"),
    "policy/entropy": Column(heading="entropy", unit="nats"),
    "policy/approxkl": Column(heading="approx KL"),
    "policy/clipfrac": Column(heading="clipped"),
    "policy/grad_norm": Column(heading="grad norm"),
    "value/explained_variance": Column(heading="expl. var"),
    "rollout/logprob_gap": Column(heading="engine diff", unit="nats"),
    "perf/tokens_per_second": Column(heading="tokens/s"),
    "time/rollout": Column(heading="rollout s"),
    "time/step": Column(heading="step s"),
}
"""The columns of the metrics that are shown of a step, in order. A run shows those that its stage names and it has."""

_REFRESHES_PER_S = 2
_BAR_WIDTH = 20
_SPEED_OVER_S = 86400.0  # the remaining time is estimated from as much past: a step may take an hour


class Display(Sink, Protocol):
    """A sink for people."""

    def phase(self, name: str) -> None:
        """Shows what the current step is doing."""
        ...


def open_display(
    title: str,
    columns: Mapping[str, Column],
    *,
    steps: int,
    console: Console,
    done: int = 0,
    clock: Callable[[], float] = process_age,
) -> Display:
    """Returns a live display in a terminal, and rows elsewhere.

    Args:
        columns: by metric, in order.
        done: steps that earlier attempts have taken.
        clock: seconds of the run, shown in a terminal.
    """
    if console.is_terminal:
        return ProgressSink(title, columns, steps=steps, done=done, clock=clock, console=console)
    return ConsoleSink(columns, steps=steps, console=console)


class ConsoleSink:
    """Prints a row per step below a heading; a missing metric is a dash.

    Args:
        fits: leave out the last columns where the console is too narrow for them.
    """

    _WIDTH = 8
    _DIGITS = 3
    _HEADED_EVERY = 40

    def __init__(self, columns: Mapping[str, Column], *, steps: int, console: Console, fits: bool = False) -> None:
        self._all = columns
        self._steps = steps
        self._console = console
        self._fits = fits
        self._columns: Mapping[str, Column] = {}
        self._rows = 0

    def phase(self, name: str) -> None:
        """Does nothing."""

    @property
    def left_out(self) -> list[str]:
        """The metrics that the last row had no place for."""
        return [name for name in self._all if name not in self._columns]

    def write(self, step: int, metrics: Metrics) -> None:
        before = self._columns
        self._columns = self._fitting()
        if self._rows % self._HEADED_EVERY == 0 or self._columns.keys() != before.keys():
            self._rows = 0
            self._row("step", [column.heading for column in self._columns.values()], "bold")
            self._row("", [column.unit for column in self._columns.values()], "dim")
        self._rows += 1
        values = [short(metrics.get(name), self._DIGITS) for name in self._columns]
        self._row(f"{step}/{self._steps}", values, None)

    def close(self) -> None:
        """Does nothing."""

    def _fitting(self) -> Mapping[str, Column]:
        if not self._fits:
            return self._all
        ends = accumulate((1 + self._width(column) for column in self._all.values()), initial=self._first_width)
        count = sum(end <= self._console.width for end in ends) - 1
        return dict(list(self._all.items())[: max(1, count)])

    def _width(self, column: Column) -> int:
        return max(self._WIDTH, len(column.heading))

    @property
    def _first_width(self) -> int:
        return 2 * len(str(self._steps)) + 3

    def _row(self, first: str, cells: Sequence[str], style: str | None) -> None:
        widths = [self._width(column) for column in self._columns.values()]
        aligned = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        line = " ".join([first.rjust(self._first_width), *aligned]).rstrip()
        self._console.print(line, style=style, markup=False, soft_wrap=True)


def phase_line(name: str, seconds: float) -> str:
    """Returns the line of a phase that begins at a time of the run's clock."""
    return f"{seconds:6.0f} s  {name}"


class _Clock(ProgressColumn):
    """Shows the run's clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._seconds = clock
        super().__init__()

    def render(self, task: Task) -> Text:
        return Text(str(timedelta(seconds=int(self._seconds()))), style="progress.elapsed")


class ProgressSink:
    """Prints a row per step above a progress bar with the current phase, which stays on the screen at the end.

    Metrics that the row has no place for are below the bar. A thread draws it; other output appears above.
    """

    def __init__(
        self,
        title: str,
        columns: Mapping[str, Column],
        *,
        steps: int,
        done: int,
        clock: Callable[[], float],
        console: Console,
    ) -> None:
        self._columns = columns
        self._metrics: Metrics = {}
        self._rows = ConsoleSink(columns, steps=steps, console=console, fits=True)
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(_BAR_WIDTH),
            MofNCompleteColumn(),
            _Clock(clock),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[phase]}", style="dim"),
            console=console,
            speed_estimate_period=_SPEED_OVER_S,
        )
        self._task = self._bar.add_task(title, total=steps, completed=done, phase="")
        self._live = Live(
            console=console,
            get_renderable=self._render,
            refresh_per_second=_REFRESHES_PER_S,
            vertical_overflow="visible",
        )
        self._live.start()

    def phase(self, name: str) -> None:
        self._bar.update(self._task, phase=name)

    def write(self, step: int, metrics: Metrics) -> None:
        self._rows.write(step, metrics)
        self._metrics = {name: metrics[name] for name in self._rows.left_out if name in metrics}
        self._bar.update(self._task, completed=step)

    def close(self) -> None:
        """Draws the last state and releases the terminal."""
        self._bar.update(self._task, phase="")
        self._live.stop()

    def _render(self) -> RenderableType:
        shown = [
            Text.assemble((f"{self._columns[name].heading} ", "dim"), short(value))
            for name, value in self._metrics.items()
        ]
        return Group(self._bar.get_renderable(), Columns(shown, padding=(0, 3)))


def short(value: float | None, digits: int = 4) -> str:
    """Returns a metric with some digits, or all before the point; a dash for None."""
    if value is None:
        return "-"
    if isinstance(value, int) or not math.isfinite(value):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"


_INTERVAL = "_ci95"


def metrics_table(metrics: Metrics) -> Table:
    """Returns a table with a row per metric and a pair of columns per prefix: value, half width of its 95% interval.

    Args:
        metrics: named `prefix/name`, the half width `prefix/name_ci95`; NaN is shown as a dash.
    """
    prefixes = list(dict.fromkeys(name.partition("/")[0] for name in metrics))
    rows = dict.fromkeys(name.partition("/")[2] for name in metrics if not name.endswith(_INTERVAL))
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("metric", no_wrap=True)
    for prefix in prefixes:
        table.add_column(prefix, justify="right", no_wrap=True)
        table.add_column("± 95%", justify="right", style="dim", no_wrap=True)
    for row in rows:
        cells: list[str] = []
        for prefix in prefixes:
            value, half_width = (metrics.get(f"{prefix}/{row}{ending}") for ending in ("", _INTERVAL))
            cells.append(_cell(value))
            cells.append("" if half_width is None else _cell(half_width))
        table.add_row(row, *cells)
    return table


def change_table(
    columns: Mapping[str, Column], lines: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]
) -> Table:
    """Returns a table of a run's metrics in its first and its last step, and of its held-out scores.

    Args:
        lines, evaluations: of all steps, as in the files.
    """
    table = Table("", "first", "last", "", box=box.SIMPLE_HEAD, show_edge=False)
    for column in table.columns[1:3]:
        column.justify = "right"
    for name, column in columns.items():
        known = [line[name] for line in lines if line.get(name) is not None]
        if known:
            table.add_row(column.heading, short(known[0]), short(known[-1]), column.unit)
    names = [name for name in (evaluations[-1] if evaluations else {}) if f"{name}{_INTERVAL}" in evaluations[-1]]
    for name in names:
        known = [line for line in evaluations if line.get(name) is not None]
        cells = [f"{short(line[name])} ± {_cell(line.get(f'{name}{_INTERVAL}'))}" for line in (known[:1] + known[-1:])]
        table.add_row(f"held-out {name.partition('/')[2]}", *cells)
    return table


def _cell(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else short(value)
