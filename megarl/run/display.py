"""Metrics for people: a live display in a terminal, a row per step elsewhere, tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, Protocol

from rich import box
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from megarl.run.sinks import Metrics, Sink

COLUMNS: Final[Mapping[str, Mapping[str, str]]] = {
    "sft": {"sft/loss": "loss", "sft/lr": "lr", "sft/grad_norm": "grad norm", "perf/tokens_per_second": "tokens/s"},
    "reward_model": {
        "reward_model/loss": "loss",
        "reward_model/accuracy": "accuracy",
        "reward_model/lr": "lr",
        "reward_model/grad_norm": "grad norm",
        "perf/tokens_per_second": "tokens/s",
    },
    "ppo": {
        "objective/score": "score",
        "objective/kl": "KL",
        "response_length/mean": "length",
        "policy/clipfrac": "clipped",
        "value/explained_variance": "explained",
        "rollout/logprob_gap": "gap",
        "time/rollout": "rollout s",
        "time/step": "step s",
    },
    "raft": {
        "objective/score": "score",
        "raft/selected_score": "selected",
        "raft/loss": "loss",
        "response_length/mean": "length",
        "time/rollout": "rollout s",
        "time/step": "step s",
    },
}
"""By stage, the heading of each metric that is shown, in order."""

_REFRESHES_PER_S = 2
_SPEED_OVER_S = 86400.0  # the remaining time is estimated from as much past: a step may take an hour


class Display(Sink, Protocol):
    """A sink for people."""

    def phase(self, name: str) -> None:
        """Shows what the current step is doing."""
        ...


def open_display(
    title: str, columns: Mapping[str, str], *, steps: int, done: int = 0, console: Console | None = None
) -> Display:
    """Returns a live display in a terminal, and rows elsewhere.

    Args:
        columns: heading by metric, in order.
        done: steps that earlier attempts have taken.
        console: None is standard output.
    """
    console = console or Console(highlight=False)
    if console.is_terminal:
        return ProgressSink(title, columns, steps=steps, done=done, console=console)
    return ConsoleSink(columns, steps=steps, console=console)


class ConsoleSink:
    """Prints a row per step below a heading; a missing metric is a dash."""

    _WIDTH = 10

    def __init__(self, columns: Mapping[str, str], *, steps: int, console: Console) -> None:
        self._columns, self._steps, self._console = columns, steps, console
        self._headed = False

    def write(self, step: int, metrics: Metrics) -> None:
        widths = {name: max(self._WIDTH, len(heading)) for name, heading in self._columns.items()}
        if not self._headed:
            headings = (heading.rjust(widths[name]) for name, heading in self._columns.items())
            self._print(" ".join(["step".rjust(self._WIDTH), *headings]), "bold")
            self._headed = True
        values = (short(metrics.get(name)).rjust(widths[name]) for name in self._columns)
        self._print(" ".join([f"{step}/{self._steps}".rjust(self._WIDTH), *values]), None)

    def phase(self, name: str) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""

    def _print(self, line: str, style: str | None) -> None:
        self._console.print(line, style=style, markup=False, soft_wrap=True)


class ProgressSink:
    """Shows a progress bar, the current phase and the metrics of the last step, which stay on the screen at the end.

    A thread draws them. Other output of the program appears above.
    """

    def __init__(self, title: str, columns: Mapping[str, str], *, steps: int, done: int, console: Console) -> None:
        self._columns = columns
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
            Text.assemble((f"{heading} ", "dim"), short(self._metrics[name]))
            for name, heading in self._columns.items()
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
    """Returns a count with its noun, such as `1 step` and `2 steps`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
