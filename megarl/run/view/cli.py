"""`megarl view`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def view(
    run_dirs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN_DIR...", show_default=False, help="Directories of runs, or of sweeps."),
    ],
    port: Annotated[int, typer.Option(help="Port on this machine; 0 is a free one.")] = 0,
    export_to: Annotated[
        Path | None,
        typer.Option("--export", metavar="FILE", help="Write an HTML file instead; or a .parquet file, the samples."),
    ] = None,
) -> None:
    """Show runs on a page: curves, samples, held-out answers, timeline, settings; live while they train."""
    from megarl.run.status.reading import StatusError, find_runs
    from megarl.run.view.page_export import export
    from megarl.run.view.page_server import PageServer
    from megarl.run.view.run_view import open_runs
    from megarl.run.view.sample_table import export_samples

    try:
        runs = [run for directory in run_dirs for run in find_runs(directory)]
        views = open_runs(runs)
        if export_to is not None and export_to.suffix == ".parquet":
            export_samples({view.name: run for view, run in zip(views, runs, strict=True)}, export_to)
            typer.echo(f"{export_to}: the samples, a row each")
            return
        if export_to is not None:
            export(views, export_to)
            typer.echo(f"{export_to}: the page, which needs nothing else")
            return
        server = PageServer(views, port)
    except StatusError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    except OSError as error:
        typer.echo(f"{error.filename or f'port {port}'}: {error.strerror}", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"{server.url}\nfor a browser on this machine, until Ctrl-C")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()
