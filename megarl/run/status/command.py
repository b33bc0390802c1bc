"""What ``megarl status`` does: it reads the runs and shows them, once or again and again."""

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
    """What the user asked for cannot be had; the message says why."""


def tell(run_dirs: Sequence[Path], *, as_json: bool, console: Console | None = None) -> None:
    """Prints how runs are doing: one in full, several in a line each.

    Args:
        run_dirs: of runs or sweeps.
        as_json: prints everything instead, an object in a line for each run.
        console: where to print; None is standard output.

    Raises:
        StatusError: a directory has no run or cannot be read; the others have been told.
    """
    statuses, problems = _read(run_dirs)
    if as_json:
        for status in statuses:
            print(json.dumps(asdict(status)))
    elif statuses:
        console = console or Console(highlight=False)
        console.print(_shown(statuses), soft_wrap=True)
    if problems:
        raise StatusError("\n".join(problems))


def watch(run_dirs: Sequence[Path], *, as_json: bool, console: Console | None = None) -> None:
    """Shows it, and again every few seconds, until it is interrupted; then the last of it stays.

    Raises:
        StatusError: there is no terminal, or JSON is asked for; or a directory has no run or cannot be read.
    """
    console = console or Console(highlight=False)
    if as_json or not console.is_terminal:
        raise StatusError("--watch: shows a terminal what changes; without one, or with --json, leave it out")
    statuses, problems = _read(run_dirs)
    if problems:
        raise StatusError("\n".join(problems))
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(_shown(statuses), refresh=True)
            time.sleep(_EVERY_S)
            statuses = _read(run_dirs)[0] or statuses  # a shared file system may be away for a moment
    console.print(_shown(statuses), soft_wrap=True)


def _read(run_dirs: Sequence[Path]) -> tuple[list[RunStatus], list[str]]:
    """The runs, and which directories have none or cannot be read."""
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


def _shown(statuses: Sequence[RunStatus]) -> RenderableType:
    return render_run(statuses[0]) if len(statuses) == 1 else render_table(statuses)
