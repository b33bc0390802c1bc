"""Shows the status of runs: one in full, several in a line each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from megarl.dashboard.status.format import ago, clock, duration, rate
from megarl.dashboard.status.reading import RunStatus, StatusError, find_runs, read_status
from megarl.files import format_bytes
from megarl.run.display import COLUMNS, short
from megarl.texts import counted, printable

_WIDTH = 12
_HEADINGS = ("run", "state", "step", "steps/h", "left", "saved", "notes")
_LONGEST_NOTE = 60


def show_status(run_dirs: Sequence[Path], *, as_json: bool) -> None:
    """Prints the status of runs; raises StatusError for directories without a run, after the others."""
    statuses: list[RunStatus] = []
    problems: list[str] = []
    for run_dir in run_dirs:
        try:
            statuses += [read_status(found) for found in find_runs(run_dir)]
        except StatusError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"{error.filename or run_dir}: {error.strerror}")
    if as_json:
        shown = [json.dumps(asdict(status)) for status in statuses]
    elif len(statuses) == 1:
        shown = [printable(f"{label:{_WIDTH}}{text}") for label, text in rows(statuses[0])]
    else:
        shown = list(table(statuses)) if statuses else []
    for line in shown:
        print(line)
    if problems:
        raise StatusError("\n".join(problems))


def rows(status: RunStatus) -> Iterator[tuple[str, str]]:
    """Yields labels and texts; an empty label continues the row above."""
    stage = f", {status.stage}" if status.stage else ""
    yield "run", f"{status.directory}{stage}"
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
    label = "checkpoints"
    for saved in status.checkpoints:
        yield label, f"step {saved.step} ({', '.join([format_bytes(saved.nbytes), *saved.kept])})"
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
        return f"{state.name} {ago(state.since, status.now)} ({clock(state.since, status.now)})"
    text = state.name
    if state.name in ("running", "silent") and status.attempts:
        last = status.attempts[-1]
        text += f" on {last.host}" if last.job is None else f" on {last.host} (job {last.job})"
    if status.written is not None:
        text += f", last written {ago(status.written, status.now)} ({clock(status.written, status.now)})"
    return text


def _progress(status: RunStatus) -> Iterator[tuple[str, str]]:
    progress = status.progress
    if progress.steps is None and not progress.step:
        return
    text = f"{progress.step} of {progress.steps or '?'}"
    if progress.steps:
        text += f" ({100 * progress.step // progress.steps}%)"
    if progress.stepped:
        text += f", the last one {ago(progress.stepped, status.now)} ({clock(progress.stepped, status.now)})"
    yield "step", text
    pace = progress.pace
    if pace is not None:
        text = f"{rate(pace.seconds_per_step)} steps/hour over the last {pace.steps}"
        text += f", {duration(pace.seconds_per_step)} each, at most {duration(pace.longest)}"
        if status.seconds_left:
            end = clock(status.now + status.seconds_left, status.now)
            text += f"; {duration(round(status.seconds_left))} left, until {end}"
        yield "pace", text
    metrics = [
        f"{column.heading} {short(status.metrics[name])}" for name, column in COLUMNS.items() if name in status.metrics
    ]
    if metrics:
        yield "metrics", ", ".join(metrics)


def _end_before(status: RunStatus) -> str:
    """Returns how the attempt before the last ended."""
    end = status.attempts[-2].end
    if end is None:
        return "killed: it wrote no reason"
    message = f" ({end.message.splitlines()[0]})" if end.message else ""
    return f"{end.reason} after step {end.step}{message}"


def table(statuses: Sequence[RunStatus]) -> Iterator[str]:
    """Yields the headings and a line per run, aligned."""
    cells: list[tuple[str, ...]] = [_HEADINGS]
    for status in statuses:
        cells.append(tuple(map(printable, _cells(status))))
    widths = [max(len(row[column]) for row in cells) for column in range(len(_HEADINGS))]
    for row in cells:
        aligned = [text.ljust(width) for text, width in zip(row, widths, strict=True)]
        yield "  ".join(aligned).rstrip()


def _cells(status: RunStatus) -> tuple[str, ...]:
    """Returns the cells of a run's row, as in _HEADINGS."""
    progress = status.progress
    step = f"{progress.step}/{progress.steps or '?'}"
    speed = "-" if progress.pace is None else rate(progress.pace.seconds_per_step)
    left = "-" if status.seconds_left is None else duration(round(status.seconds_left))
    saved = str(status.checkpoints[-1].step) if status.checkpoints else "-"
    notes: list[str] = []
    for text in (*status.state.message.splitlines()[:1], *status.troubles):
        notes.append(text if len(text) <= _LONGEST_NOTE else f"{text[: _LONGEST_NOTE - 3]}...")
    return (status.directory, status.state.name, step, speed, left, saved, ", ".join(notes))
