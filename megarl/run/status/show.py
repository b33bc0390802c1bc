"""Shows the status of runs, once or repeatedly."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live

from megarl.run.status.reading import NoRunError, RunStatus, find_runs, read_status
from megarl.run.status.render import render_run, render_table

_EVERY_S = 5.0


class StatusError(ValueError):
    """A status cannot be shown; the message is for the user."""


def show_status(run_dirs: Sequence[Path], *, as_json: bool) -> None:
    """Prints the status of runs or sweeps: one run in full, several in a line each, or JSON.

    Raises:
        StatusError: a directory has no run or cannot be read; the others are printed.
    """
    statuses, problems = _read(run_dirs)
    if as_json:
        for found in statuses:
            print(json.dumps(asdict(found)))
    elif statuses:
        Console(highlight=False).print(_render(statuses), soft_wrap=True)
    if problems:
        raise StatusError("\n".join(problems))


def watch_status(run_dirs: Sequence[Path], *, as_json: bool, console: Console | None = None) -> None:
    """Shows the status every few seconds, until it is interrupted; the last one stays on the screen.

    Raises:
        StatusError: there is no terminal, or JSON is asked for; or a directory has no run or cannot be read.
    """
    console = console or Console(highlight=False)
    if as_json or not console.is_terminal:
        raise StatusError("--watch: updates a terminal; leave it out without a terminal or with --json")
    statuses, problems = _read(run_dirs)
    if problems:
        raise StatusError("\n".join(problems))
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(_render(statuses), refresh=True)
            time.sleep(_EVERY_S)
            statuses = _read(run_dirs)[0] or statuses  # a shared file system may be away for a moment
    console.print(_render(statuses), soft_wrap=True)


def _read(run_dirs: Sequence[Path]) -> tuple[list[RunStatus], list[str]]:
    """The statuses, and the problems of directories that have none or cannot be read."""
    statuses: list[RunStatus] = []
    problems: list[str] = []
    for run_dir in run_dirs:
        try:
            statuses += [read_status(found) for found in find_runs(run_dir)]
        except NoRunError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"{error.filename or run_dir}: {error.strerror}")
    return statuses, problems


def _render(statuses: Sequence[RunStatus]) -> RenderableType:
    return render_run(statuses[0]) if len(statuses) == 1 else render_table(statuses)
