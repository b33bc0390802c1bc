"""Metrics on the console: a row per step, a progress bar in a terminal, tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from megarl.run.sinks import Metrics


@dataclass(frozen=True)
class Column:
    """A metric that is shown for every step; below its heading is the unit, or the limit of healthy values."""

    heading: str
    unit: str = ""


COLUMNS: Final[Mapping[str, Column]] = {
    "sft/loss": Column("loss", "nats"),
    "sft/lr": Column("lr"),
    "sft/grad_norm": Column("grad norm"),
    "dpo/loss": Column("loss"),
    "dpo/accuracy": Column("accuracy"),
    "dpo/margin": Column("margin"),
    "dpo/kl": Column("KL", "nats"),
    "dpo/lr": Column("lr"),
    "dpo/grad_norm": Column("grad norm"),
    "reward_model/loss": Column("loss", "nats"),
    "reward_model/accuracy": Column("accuracy"),
    "reward_model/lr": Column("lr"),
    "reward_model/grad_norm": Column("grad norm"),
    "objective/score": Column("score"),
    "objective/kl": Column("KL", "nats"),
    "select/score": Column("selected"),
    "response_length/mean": Column("length", "tokens"),
    "truncated_fraction": Column("truncated"),
    "group/zero_std_fraction": Column("zero std"),
    "policy/entropy": Column("entropy", "nats"),
    "policy/approxkl": Column("approx KL"),
    "policy/clipfrac": Column("clipped"),
    "policy/grad_norm": Column("grad norm"),
    "value/explained_variance": Column("expl. var"),
    "rollout/logprob_gap": Column("engine diff", "nats"),
    "perf/tokens_per_second": Column("tokens/s"),
    "time/rollout": Column("rollout s"),
    "time/step": Column("step s"),
}
"""The columns of a step, in order. A run shows those that its stage names and it has."""

_REFRESHES_PER_S = 2
_BAR_WIDTH = 20
_SPEED_OVER_S = 86400.0  # the remaining time is estimated from as much past: a step may take an hour
_MIN_WIDTH = 8
_DIGITS = 3
_HEADED_EVERY = 40


def phase_line(name: str, seconds: float) -> str:
    """Returns the line of a phase that begins at a time of the run's clock."""
    return f"{seconds:6.0f} s  {name}"


class Display:
    """Prints a row per step below a heading; a missing metric is a dash.

    In a terminal, a row has the first columns that fit, and below the rows is a progress bar with
    the current phase, which stays on the screen at the end. A thread draws it; other
    output appears above. Earlier attempts have taken `done` steps.
    """

    def __init__(
        self,
        title: str,
        columns: Mapping[str, Column],
        *,
        steps: int,
        console: Console,
        done: int = 0,
    ) -> None:
        self._all = columns
        self._columns: Mapping[str, Column] = {}
        self._steps = steps
        self._first_width = 2 * len(str(steps)) + 3
        self._console = console
        self._rows = 0
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(_BAR_WIDTH),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[phase]}", style="dim"),
            console=console,
            refresh_per_second=_REFRESHES_PER_S,
            speed_estimate_period=_SPEED_OVER_S,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(title, total=steps, completed=done, phase="")
        self._bar.start()

    def phase(self, name: str) -> None:
        """Shows what the current step is doing."""
        self._bar.update(self._task, phase=name)

    def write(self, step: int, metrics: Metrics) -> None:
        """Prints the row of a step."""
        columns = self._fitting()
        if self._rows % _HEADED_EVERY == 0 or columns != self._columns:
            self._rows = 0
            self._columns = columns
            self._row("step", [column.heading for column in columns.values()], "bold")
            self._row("", [column.unit for column in columns.values()], "dim")
        self._rows += 1
        cells = [short(metrics.get(name), _DIGITS) for name in columns]
        self._row(f"{step}/{self._steps}", cells, None)
        self._bar.update(self._task, completed=step)

    def close(self) -> None:
        """Draws the last state and releases the terminal."""
        self._bar.update(self._task, phase="")
        if self._console.is_terminal:  # rich 13 ends a line elsewhere
            self._bar.stop()

    def _fitting(self) -> Mapping[str, Column]:
        if not self._console.is_terminal:
            return self._all
        left = self._console.width - self._first_width
        fitting: dict[str, Column] = {}
        for name, column in self._all.items():
            left -= 1 + _width(column)
            if fitting and left < 0:
                break
            fitting[name] = column
        return fitting

    def _row(self, first: str, cells: Sequence[str], style: str | None) -> None:
        line = first.rjust(self._first_width)
        for cell, column in zip(cells, self._columns.values(), strict=True):
            line += " " + cell.rjust(_width(column))
        self._console.print(line.rstrip(), style=style, markup=False, soft_wrap=True)


def _width(column: Column) -> int:
    return max(_MIN_WIDTH, len(column.heading))


def short(value: float | None, digits: int = 4) -> str:
    """Returns a metric with some digits, or all before the point; a dash for None."""
    if value is None:
        return "-"
    if isinstance(value, int) or not math.isfinite(value):
        return str(value)
    if abs(value) >= 10**digits:
        return f"{value:.0f}"
    return f"{value:.{digits}g}"


_INTERVAL = "_ci95"


def metrics_table(metrics: Metrics) -> Table:
    """Returns a table of metrics `eval/NAME`, and half the widths of their intervals, `NAME_ci95`."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("metric", no_wrap=True)
    table.add_column("eval", justify="right", no_wrap=True)
    table.add_column("± 95%", justify="right", style="dim", no_wrap=True)
    for name, value in metrics.items():
        if not name.endswith(_INTERVAL):
            half_width = f"{name}{_INTERVAL}"
            interval = _cell(metrics[half_width]) if half_width in metrics else ""
            table.add_row(name.removeprefix("eval/"), _cell(value), interval)
    return table


def _cell(value: float) -> str:
    return short(None if math.isnan(value) else value)
