"""`megarl status`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def status(
    run_dirs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN_DIR...", show_default=False, help="Directories of runs, or of sweeps."),
    ],
    watch: Annotated[bool, typer.Option("--watch", help="Look again every few seconds, until interrupted.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON, an object a line a run.")] = False,
) -> None:
    """Say how runs are doing: how far, how fast, how they ended and why. Reads their directories alone."""
    from megarl.run.status.reading import StatusError
    from megarl.run.status.show import show_status, watch_status

    try:
        if watch:
            watch_status(run_dirs, as_json=as_json)
        else:
            show_status(run_dirs, as_json=as_json)
    except StatusError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
