"""Where metrics go: JSON lines, tables on the console; which of them people see of a step."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self

from rich import box
from rich.console import Console
from rich.table import Table

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
"""Of each stage: heading by metric, in order."""


Metrics = Mapping[str, float]

WRITTEN: Final = "time/written"
"""In a file's lines: when each was written."""


class Sink(Protocol):
    """Anything that takes the metrics of a step."""

    def write(self, step: int, metrics: Metrics) -> None:
        """Takes the metrics of one step; steps come in rising order."""
        ...

    def close(self) -> None:
        """Ends it; everything is written then."""
        ...


class JsonLines:
    """A file of JSON objects, one per line, each flushed; what is there already stays.

    JSON has no number that is not finite: it is written as null.

    Args:
        path: the file; its directory is made.
    """

    def __init__(self, path: str | Path) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115  closed by close

    def write(self, entries: Mapping[str, Any]) -> None:
        """Appends an object."""
        self._file.write(json.dumps(as_json(entries), allow_nan=False, ensure_ascii=False) + "\n")
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


class JsonlSink:
    """Appends one JSON object per step to a file: ``step`` first, and last when it was written, in seconds since 1970.

    Args:
        path: see JsonLines.
        clock: seconds since 1970.
    """

    def __init__(self, path: str | Path, clock: Callable[[], float] = time.time) -> None:
        self._lines = JsonLines(path)
        self._clock = clock

    def write(self, step: int, metrics: Metrics) -> None:
        """Appends the object of one step."""
        self._lines.write({"step": step, **metrics, WRITTEN: self._clock()})

    def close(self) -> None:
        """Closes the file."""
        self._lines.close()

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
        values = (short(metrics.get(name)).rjust(widths[name]) for name in self._columns)
        self._print(" ".join([f"{step}/{self._steps}".rjust(self._WIDTH), *values]), None)

    def phase(self, name: str) -> None:
        """Says nothing: the rows tell how long each step took."""

    def close(self) -> None:
        """Nothing is left to print."""

    def _print(self, line: str, style: str | None) -> None:
        self._console.print(line, style=style, markup=False, soft_wrap=True)


def as_json(value: Any) -> Any:
    """As JSON has it: numbers of numpy as plain ones, and null for those that are not finite."""
    if isinstance(value, Mapping):
        return {str(name): as_json(entry) for name, entry in value.items()}
    if isinstance(value, bool | str) or value is None:
        return value
    if isinstance(value, Sequence):
        return [as_json(entry) for entry in value]
    if isinstance(value, Integral):
        return int(value)
    return float(value) if math.isfinite(value) else None


def short(value: float | None) -> str:
    """A metric in few characters; a dash where there is none."""
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.4g}"


_INTERVAL = "_ci95"


def metrics_table(metrics: Mapping[str, float]) -> Table:
    """A row per metric, with the half width of its 95% interval where it has one.

    Metrics are named ``prefix/name``. Those of each prefix have columns of their own; a number that is not known is a
    dash.

    Args:
        metrics: among them ``prefix/name_ci95``, the half width of the interval of ``prefix/name``.
    """
    prefixes = list(dict.fromkeys(name.partition("/")[0] for name in metrics))
    rows = dict.fromkeys(name.partition("/")[2] for name in metrics if not name.endswith(_INTERVAL))
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("metric", no_wrap=True)
    for prefix in prefixes:
        table.add_column(prefix, justify="right", no_wrap=True)
        table.add_column("± 95%", justify="right", style="dim", no_wrap=True)
    for row in rows:
        cells = (
            _shown(metrics.get(f"{prefix}/{row}{ending}"), absent)
            for prefix in prefixes
            for ending, absent in (("", "-"), (_INTERVAL, ""))
        )
        table.add_row(row, *cells)
    return table


def _shown(value: float | None, absent: str) -> str:
    if value is None:
        return absent
    return "-" if math.isnan(value) else short(value)
