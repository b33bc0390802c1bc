"""Shows the status of runs: one in full, several in a line each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.text import Text

from megarl.files import format_bytes
from megarl.run.attempts import Attempt
from megarl.run.display import COLUMNS, short
from megarl.run.sinks import WRITTEN
from megarl.run.status.format import ago, clock, duration, rate, step_duration
from megarl.run.status.reading import CheckpointState, RunStatus, SavedCheckpoint, StatusError, find_runs, read_status
from megarl.run.status.run_state import StateName
from megarl.texts import counted, printable

STYLES: Final[Mapping[StateName, str]] = {
    "finished": "green",
    "profiled": "green",
    "running": "green",
    "preempted": "yellow",
    "interrupted": "yellow",
    "failed": "red",
    "killed": "red",
    "silent": "red",
    "waiting": "yellow",
    "unknown": "yellow",
}
_WIDTH = 12
_INTERVAL = "_ci95"
_HEADINGS = ("run", "state", "step", "steps/h", "left", "last step", "saved", "metrics")
_METRICS = 2
_LONGEST = 60

Row = tuple[str, str, str]
"""Label, text and style; an empty label continues the row above."""


def render_run(status: RunStatus) -> RenderableType:
    return Group(
        *(Text.assemble((label.ljust(_WIDTH), "dim"), (printable(text), style)) for label, text, style in rows(status))
    )


def rows(status: RunStatus) -> Iterator[Row]:
    """Yields the whole status of a run."""
    yield "run", f"{status.directory}{f', {status.stage}' if status.stage else ''}", "bold"
    yield from _state(status)
    yield from _progress(status)
    if status.verdict:
        yield "verdict", status.verdict, "" if status.verdict.startswith("learned") else "yellow"
    for trouble in status.troubles:
        yield "look at", trouble, "yellow"
    if replaced := status.metrics.get("rollout/engines_replaced"):
        text = f"{counted(replaced, 'engine')} replaced in this attempt, because they died or hung"
        yield "look at", text, "yellow"
    yield from _saved(status)
    if status.evaluation:
        after = f"after step {status.evaluation['step']}: " if status.progress.steps else ""
        yield "evaluation", f"{after}{_values(status.evaluation)}", ""
    yield from _attempts(status)
    yield from _logs(status)


def _state(status: RunStatus) -> Iterator[Row]:
    state = status.state
    text = state.name
    if status.attempts and state.name in ("running", "silent"):
        text += f" on {_place(status.attempts[-1])}"
    if state.since is not None:
        text += f" {ago(state.since, status.now)} ({clock(state.since, status.now)})"
    if state.because:
        text += f": {state.because}"
    style = STYLES[state.name]
    yield "state", text, style
    for line in state.message.splitlines():
        yield "", line, style
    submitted = status.submitted
    if submitted is not None:
        what = "prepared for a cluster"
        if submitted.job is not None:
            what = f"job {submitted.job} was submitted"
        yield "", f"{what} {ago(submitted.time, status.now)}; nothing has started since", ""


def _progress(status: RunStatus) -> Iterator[Row]:
    now = status.now
    progress = status.progress
    if progress.steps is None and not progress.step:
        return
    text = f"{progress.step} of {progress.steps or '?'}"
    if progress.steps:
        text += f" ({100 * progress.step // progress.steps}%)"
    if progress.stepped:
        text += f", the last one {ago(progress.stepped, now)} ({clock(progress.stepped, now)})"
    yield "step", text, ""
    if status.attempts and status.state.name == "running":
        begun = status.attempts[-1].time
        if progress.stepped is None or progress.stepped < begun:
            started = f"{ago(begun, now)} ({clock(begun, now)})"
            yield "", f"no step yet in the attempt that started {started}", ""
    yield from _pace(status)
    shown = _console_metrics(status)
    if shown:
        yield "metrics", ", ".join(shown), ""


def _pace(status: RunStatus) -> Iterator[Row]:
    pace = status.progress.pace
    if pace is None:
        return
    if status.overdue is not None:
        late = duration(status.overdue)
        longest = step_duration(pace.longest)
        yield "", f"no step for {late}; the last ones took {longest} at most: does it hang?", "red"
    text = f"{rate(pace.steps_per_hour)} steps/hour over the last {pace.steps}"
    text += f", {step_duration(pace.seconds_per_step)} each"
    left = status.seconds_left
    if left:
        text += f"; {duration(left)} left, until {clock(status.now + left, status.now)}"
    yield "pace", text, ""


def _saved(status: RunStatus) -> Iterator[Row]:
    saved = status.saved
    if saved is None or status.state.name == "profiled":
        return
    if status.state.name == "waiting" and not saved.step:
        return
    text = f"step {saved.step}" if saved.step else "none yet"
    if saved.writing is not None:
        text += f"; step {saved.writing} is not complete"
    if status.state.name != "finished":
        text += f"; a resume {_resume(saved)}"
    yield "checkpoint", text, ""
    if saved.checkpoints:
        yield "", ", ".join(map(_checkpoint, saved.checkpoints)), ""


def _resume(saved: CheckpointState) -> str:
    """Describes what a resume does: `repeats 7 steps, about 14 min`."""
    again = "loses nothing"
    if saved.again:
        again = f"repeats {counted(saved.again, 'step')}"
        if saved.seconds:
            again += f", about {duration(saved.seconds)}"
    if saved.step:
        return again
    if saved.again:
        return f"starts from the beginning and {again}"
    return "starts from the beginning"


def _checkpoint(saved: SavedCheckpoint) -> str:
    """Returns a checkpoint's step, size and why it is kept: `step 40 (1.1 MB, newest)`."""
    return f"step {saved.step} ({', '.join([format_bytes(saved.nbytes), *saved.kept])})"


def _values(metrics: Mapping[str, Any]) -> str:
    """Returns the metrics of an evaluation, with the half width of their intervals."""
    shown = (
        f"{name.removeprefix('eval/')} {short(value)}"
        + (f" ± {short(metrics[name + _INTERVAL])}" if name + _INTERVAL in metrics else "")
        for name, value in metrics.items()
        if not name.endswith(_INTERVAL) and name not in ("step", WRITTEN)
    )
    return ", ".join(shown)


def _attempts(status: RunStatus) -> Iterator[Row]:
    """Yields the number of attempts and the error of the one before the last, if it has one."""
    if len(status.attempts) < 2:
        return
    before = status.attempts[-2]
    text = "killed: it wrote no reason"
    if before.end is not None:
        text = f"{before.end.reason} after step {before.end.step}"
        if before.end.message:
            text += f" ({before.end.message.splitlines()[0]})"
    yield "attempts", f"{len(status.attempts)}; the one before ended: {text}", ""


def _place(attempt: Attempt) -> str:
    return attempt.host if attempt.job is None else f"{attempt.host} (job {attempt.job})"


def _logs(status: RunStatus) -> Iterator[Row]:
    yield "logs", f"{status.logs} (one file per process)", ""
    if status.job_logs is not None:
        yield "", f"{status.job_logs} (Slurm job)", ""


def render_table(statuses: Sequence[RunStatus]) -> RenderableType:
    """Returns a table with a row per run; warnings are at the end of each."""
    cells = [_HEADINGS, *(tuple(map(printable, _cells(status))) for status in statuses)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(_HEADINGS))]
    styles = ["bold", *(STYLES[status.state.name] for status in statuses)]
    lines = []
    for row, style in zip(cells, styles, strict=True):
        aligned = [text.ljust(width) for text, width in zip(row, widths, strict=True)]
        lines.append(Text("  ".join(aligned).rstrip(), style="bold" if style == "bold" else ""))
        lines[-1].stylize(style, widths[0] + 2, widths[0] + 2 + len(row[1]))
    return Group(*lines)


def _cells(status: RunStatus) -> tuple[str, ...]:
    """Returns the cells of a run's row, as in _HEADINGS."""
    progress = status.progress
    speed = left = last = saved = "-"
    if progress.pace is not None:
        speed = rate(progress.pace.steps_per_hour)
    if status.seconds_left is not None:
        left = duration(status.seconds_left)
    if progress.stepped is not None:
        last = ago(progress.stepped, status.now)
    if status.saved is not None and status.saved.step:
        saved = str(status.saved.step)
    step = f"{progress.step}/{progress.steps or '?'}"
    notes = ", ".join([*_console_metrics(status)[:_METRICS], *_short_warnings(status)])
    return (status.directory, status.state.name, step, speed, left, last, saved, notes)


def _console_metrics(status: RunStatus) -> list[str]:
    """Returns the metrics of the last step that the console shows, with their headings."""
    shown: list[str] = []
    for name, column in COLUMNS.items():
        if name in status.metrics:
            shown.append(f"{column.heading} {short(status.metrics[name])}")
    return shown


def _short_warnings(status: RunStatus) -> Iterator[str]:
    warnings = [*status.state.message.splitlines()[:1], *status.troubles]
    if status.overdue is not None:
        warnings.insert(0, "does it hang?")
    for text in warnings:
        if len(text) > _LONGEST:
            text = f"{text[: _LONGEST - 3]}..."
        yield text


def show_status(run_dirs: Sequence[Path], *, as_json: bool) -> None:
    """Prints the status of runs or sweeps; raises StatusError for directories without a run, after the others."""
    statuses, problems = _read(run_dirs)
    if as_json:
        for found in statuses:
            print(json.dumps(asdict(found)))
    elif statuses:
        Console(highlight=False).print(_render(statuses), soft_wrap=True)
    if problems:
        raise StatusError("\n".join(problems))


def _read(run_dirs: Sequence[Path]) -> tuple[list[RunStatus], list[str]]:
    """Returns the statuses, and the problems of directories that have none or cannot be read."""
    statuses: list[RunStatus] = []
    problems: list[str] = []
    for run_dir in run_dirs:
        try:
            statuses += [read_status(found) for found in find_runs(run_dir)]
        except StatusError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"{error.filename or run_dir}: {error.strerror}")
    return statuses, problems


def _render(statuses: Sequence[RunStatus]) -> RenderableType:
    return render_run(statuses[0]) if len(statuses) == 1 else render_table(statuses)
