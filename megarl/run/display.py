"""Metrics for people: a live display in a terminal, a row per step elsewhere, tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Protocol

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


def _column(heading: str, unit: str = "") -> Column:
    return Column(heading=heading, unit=unit)


_SUPERVISED: Final[Mapping[str, Column]] = {
    "perf/tokens_per_second": _column("tokens/s"),
    "time/step": _column("step s"),
}
_LENGTH: Final[Mapping[str, Column]] = {
    "response_length/mean": _column("length", "tokens"),
    "truncated_fraction": _column("truncated"),
}
_SECONDS: Final[Mapping[str, Column]] = {"time/rollout": _column("rollout s"), "time/step": _column("step s")}

COLUMNS: Final[Mapping[str, Mapping[str, Column]]] = {
    "sft": {
        "sft/loss": _column("loss", "nats"),
        "sft/lr": _column("lr"),
        "sft/grad_norm": _column("grad norm"),
        **_SUPERVISED,
    },
    "reward_model": {
        "reward_model/loss": _column("loss", "nats"),
        "reward_model/accuracy": _column("accuracy"),
        "reward_model/lr": _column("lr"),
        "reward_model/grad_norm": _column("grad norm"),
        **_SUPERVISED,
    },
    "ppo": {
        "objective/score": _column("score"),
        "objective/kl": _column("KL", "nats"),
        **_LENGTH,
        "group/zero_std_fraction": _column("zero std"),
        "policy/entropy": _column("entropy", "nats"),
        "policy/approxkl": _column("approx KL"),
        "policy/clipfrac": _column("clipped"),
        "policy/grad_norm": _column("grad norm"),
        "value/explained_variance": _column("expl. var"),
        "rollout/logprob_gap": _column("engine diff", "nats"),
        **_SECONDS,
    },
    "raft": {
        "objective/score": _column("score"),
        "raft/selected_score": _column("selected"),
        "raft/loss": _column("loss", "nats"),
        "raft/entropy": _column("entropy", "nats"),
        **_LENGTH,
        **_SECONDS,
    },
}
"""By stage, the columns of each metric that is shown, in order. A run leaves out those that it never has."""

_REFRESHES_PER_S = 2
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
    done: int = 0,
    clock: Callable[[], float] = process_age,
    console: Console | None = None,
) -> Display:
    """Returns a live display in a terminal, and rows elsewhere.

    Args:
        columns: by metric, in order.
        done: steps that earlier attempts have taken.
        clock: seconds of the run, shown in a terminal.
        console: None is standard output.
    """
    console = console or Console(highlight=False)
    if console.is_terminal:
        return ProgressSink(title, columns, steps=steps, done=done, clock=clock, console=console)
    return ConsoleSink(columns, steps=steps, console=console)


class ConsoleSink:
    """Prints a row per step below a heading; a missing metric is a dash."""

    _WIDTH, _DIGITS, _HEADED_EVERY = 8, 3, 40

    def __init__(self, columns: Mapping[str, Column], *, steps: int, console: Console) -> None:
        self._columns, self._steps, self._console = columns, steps, console
        self._rows = 0

    def phase(self, name: str) -> None:
        """Does nothing."""

    def write(self, step: int, metrics: Metrics) -> None:
        if self._rows % self._HEADED_EVERY == 0:
            self._row("step", [column.heading for column in self._columns.values()], "bold")
            self._row("", [column.unit for column in self._columns.values()], "dim")
        self._rows += 1
        values = [short(metrics.get(name), self._DIGITS) for name in self._columns]
        self._row(f"{step}/{self._steps}", values, None)

    def close(self) -> None:
        """Does nothing."""

    def _row(self, first: str, cells: Sequence[str], style: str | None) -> None:
        headings = [column.heading for column in self._columns.values()]
        aligned = [cell.rjust(max(self._WIDTH, len(heading))) for cell, heading in zip(cells, headings, strict=True)]
        self._print(" ".join([first.rjust(2 * len(str(self._steps)) + 3), *aligned]).rstrip(), style)

    def _print(self, line: str, style: str | None) -> None:
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
    """Shows a progress bar, the current phase and the metrics of the last step, which stay on the screen at the end.

    A thread draws them. Other output of the program appears above.
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
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
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
        self._metrics = metrics
        self._bar.update(self._task, completed=step)

    def close(self) -> None:
        """Draws the last state and releases the terminal."""
        self._bar.update(self._task, phase="")
        self._live.stop()

    def _render(self) -> RenderableType:
        shown = [
            Text.assemble((f"{column.heading} ", "dim"), short(self._metrics[name]))
            for name, column in self._columns.items()
            if name in self._metrics
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


def _cell(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else short(value)


def counted(count: int, noun: str) -> str:
    """Returns a count with its noun, such as `1 step`, `2 steps` and `2 mini-batches`."""
    return f"{count} {noun}" + ("" if count == 1 else "es" if noun.endswith("batch") else "s")
