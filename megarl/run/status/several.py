"""Several runs at once, a line each, as of a sweep."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from megarl.run.sinks import COLUMNS, short
from megarl.run.status.one import STYLES
from megarl.run.status.reading import RunStatus
from megarl.run.status.words import ago, duration, rate

_HEADINGS = ("run", "state", "step", "steps/h", "left", "last step", "saved", "metrics")
_METRICS = 2
_LONGEST = 60


def show(statuses: Sequence[RunStatus]) -> RenderableType:
    """Aligned rows under a heading; what wants a look is at the end of each."""
    cells = [_HEADINGS, *(_cells(status) for status in statuses)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(_HEADINGS))]
    styles = ["bold", *(STYLES[status.state.name] for status in statuses)]
    lines = []
    for row, style in zip(cells, styles, strict=True):
        aligned = [text.ljust(width) for text, width in zip(row, widths, strict=True)]
        lines.append(Text("  ".join(aligned).rstrip(), style="bold" if style == "bold" else ""))
        lines[-1].stylize(style, widths[0] + 2, widths[0] + 2 + len(row[1]))
    return Group(*lines)


def _cells(status: RunStatus) -> tuple[str, ...]:
    columns = list(COLUMNS.get(status.stage or "", {}).items())[:_METRICS]
    metrics = [f"{heading} {short(status.metrics[name])}" for name, heading in columns if name in status.metrics]
    troubles = (*(("does it hang?",) if status.overdue is not None else ()), *status.state.message.splitlines()[:1])
    said = ", ".join([*metrics, *(_cut(trouble) for trouble in (*troubles, *status.troubles))])
    progress, pace, saved = status.progress, status.progress.pace, status.saved
    return (
        status.directory,
        status.state.name,
        f"{progress.step}/{progress.steps or '?'}",
        "-" if pace is None else rate(pace.steps_per_hour),
        "-" if status.seconds_left is None else duration(status.seconds_left),
        "-" if progress.stepped is None else ago(progress.stepped, status.now),
        "-" if saved is None or not saved.step else str(saved.step),
        said,
    )


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
