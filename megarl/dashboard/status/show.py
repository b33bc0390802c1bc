"""Shows the status of runs: one in full, several in a line each."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from megarl.dashboard.status.reading import RunStatus, find_runs, read_status
from megarl.errors import UsageError
from megarl.files import format_bytes
from megarl.run.display import COLUMNS, short
from megarl.texts import counted, printable

_WIDTH = 12
_HEADINGS = ("run", "state", "step", "steps/h", "left", "saved", "notes")
_LONGEST_NOTE = 60
_MINUTE = 60
_HOUR = 3600
_DAY = 86400


def show_status(run_dirs: Sequence[Path], *, as_json: bool) -> None:
    """Prints the status of runs; raises UsageError for directories without a run, after the others."""
    statuses: list[RunStatus] = []
    problems: list[str] = []
    for run_dir in run_dirs:
        try:
            statuses += [read_status(found) for found in find_runs(run_dir)]
        except UsageError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"{error.filename or run_dir}: {error.strerror}")
    if as_json:
        for status in statuses:
            print(json.dumps(asdict(status)))
    elif len(statuses) == 1:
        for label, text in rows(statuses[0]):
            print(printable(f"{label:{_WIDTH}}{text}"))
    elif statuses:
        print("\n".join(table(statuses)))
    if problems:
        raise UsageError("\n".join(problems))


def rows(status: RunStatus) -> Iterator[tuple[str, str]]:
    """Yields labels and texts; an empty label continues the row above."""
    yield "run", ", ".join(filter(None, [status.directory, status.stage]))
    yield "state", _state(status)
    for line in status.state.message.splitlines():
        yield "", line
    yield from _progress(status)
    if status.verdict:
        yield "verdict", status.verdict
    for trouble in status.troubles:
        yield "look at", trouble
    if replaced := status.metrics.get("rollout/engines_replaced"):
        yield "look at", f"{counted(replaced, 'engine')} replaced in this attempt, because they died or hung"
    if share := status.metrics.get("rollout/draft_share"):
        yield "drafts", f"{share:.0%} of the sampled tokens"
    label = "checkpoints"
    for saved in status.checkpoints:
        yield label, f"step {saved.step} ({format_bytes(saved.nbytes)})"
        label = ""
    if status.unfinished is not None:
        yield label, f"step {status.unfinished} is not complete"
    if len(status.attempts) > 1:
        yield "attempts", f"{len(status.attempts)}; the one before ended: {_end_before(status)}"
    yield "logs", f"{status.logs} (one file per process)"
    if status.job_logs is not None:
        yield "", f"{status.job_logs} (Slurm job)"


def _state(status: RunStatus) -> str:
    state = status.state
    if state.since is not None:
        return f"{state.name} {ago(state.since, status.now)}"
    text = state.name
    if state.name in ("running", "silent") and status.attempts:
        last = status.attempts[-1]
        text += f" on {last.host}"
        if last.job is not None:
            text += f" (job {last.job})"
    if status.written is not None:
        text += f", last written {ago(status.written, status.now)}"
    return text


def _progress(status: RunStatus) -> Iterator[tuple[str, str]]:
    progress = status.progress
    if progress.steps is None and not progress.step:
        return
    text = f"{progress.step} of {progress.steps or '?'}"
    if progress.steps:
        text += f" ({100 * progress.step // progress.steps}%)"
    if progress.stepped:
        text += f", the last one {ago(progress.stepped, status.now)}"
    yield "step", text
    pace = progress.pace
    if pace is not None:
        text = f"{rate(pace.seconds_per_step)} steps/hour over the last {pace.steps}"
        text += f", {duration(pace.seconds_per_step)} each, at most {duration(pace.longest)}"
        if status.seconds_left:
            end = clock(status.now + status.seconds_left, status.now)
            text += f"; {duration(round(status.seconds_left))} left, until {end}"
        yield "pace", text
    metrics: list[str] = []
    for name, column in COLUMNS.items():
        if name in status.metrics:
            metrics.append(f"{column.heading} {short(status.metrics[name])}")
    if metrics:
        yield "metrics", ", ".join(metrics)


def _end_before(status: RunStatus) -> str:
    end = status.attempts[-2].end
    if end is None:
        return "killed: it wrote no reason"
    text = f"{end.reason} after step {end.step}"
    if end.message:
        text += f" ({end.message.splitlines()[0]})"
    return text


def table(statuses: Sequence[RunStatus]) -> Iterator[str]:
    """Yields the headings and a line per run, aligned."""
    cells: list[tuple[str, ...]] = [_HEADINGS]
    for status in statuses:
        cells.append(tuple(map(printable, _cells(status))))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        yield "  ".join(map(str.ljust, row, widths)).rstrip()


def _cells(status: RunStatus) -> tuple[str, ...]:
    """Returns the cells of a run's row, as in _HEADINGS."""
    progress = status.progress
    step = f"{progress.step}/{progress.steps or '?'}"
    speed = left = saved = "-"
    if progress.pace is not None:
        speed = rate(progress.pace.seconds_per_step)
    if status.seconds_left is not None:
        left = duration(round(status.seconds_left))
    if status.checkpoints:
        saved = str(status.checkpoints[-1].step)
    notes: list[str] = []
    for text in (*status.state.message.splitlines()[:1], *status.troubles):
        if len(text) > _LONGEST_NOTE:
            text = f"{text[: _LONGEST_NOTE - 3]}..."
        notes.append(text)
    return (status.directory, status.state.name, step, speed, left, saved, ", ".join(notes))


def duration(seconds: float) -> str:
    """Returns a duration in two units at most, with a fraction below ten seconds."""
    if 0 < seconds < 9.95 and seconds != round(seconds):
        return f"{seconds:.2g} s"
    rounded = max(0, round(seconds))
    if rounded < 2 * _MINUTE:
        return f"{rounded} s"
    if rounded < 2 * _HOUR:
        return f"{rounded // _MINUTE} min"
    if rounded < 2 * _DAY:
        return f"{rounded // _HOUR} h {rounded % _HOUR // _MINUTE} min"
    return f"{rounded // _DAY} d {rounded % _DAY // _HOUR} h"


def rate(seconds_per_step: float) -> str:
    """Returns the steps per hour with three digits, or all digits before the point."""
    per_hour = _HOUR / seconds_per_step
    if per_hour >= 100:
        return f"{per_hour:,.0f}"
    return f"{per_hour:.3g}"


def clock(when: float, now: float) -> str:
    """Returns the local time, with the date unless it is today's; both times in seconds since 1970."""
    then = time.localtime(when)
    same_day = then[:3] == time.localtime(now)[:3]
    return time.strftime("%H:%M" if same_day else "%a %d %b %H:%M", then)


def ago(when: float, now: float) -> str:
    """Returns the time since `when`, and `when`; at least 0 s, as other clocks may be ahead."""
    return f"{duration(round(now - when))} ago ({clock(when, now)})"
