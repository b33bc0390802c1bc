"""``megarl launch ray``: its arguments and options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def ray(
    config_path: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.")],
    address: Annotated[str, typer.Option(metavar="URL", help="Dashboard of the cluster, as http://HEAD:8265.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY.PATH=VALUE", help="Settings to override.")
    ] = None,
    working_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Send this directory, 100 MiB at most, and run in its copy: for a machine that does not share the "
            "cluster's file system. Default: run in the present directory, which all nodes must see.",
        ),
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(
            help="Interpreter on the head that has megarl: this one; with --working-dir python of the head's PATH."
        ),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Follow the job to its end, or return once it is submitted.")
    ] = True,
) -> None:
    """Run CONFIG as a job of a Ray cluster that is up: several nodes without Slurm, or KubeRay.

    The configuration is checked first. What the job prints is printed here, and its exit code is this command's; an
    interrupt stops the job. run.dir must be where the head and all nodes see it. docs/ray.md says how to start a
    cluster.
    """
    from megarl.config import ConfigError
    from megarl.errors import RunError
    from megarl.launch.ray_job import launch

    try:
        code = launch(config_path, overrides or (), address=address, working_dir=working_dir, python=python, wait=wait)
    except (ConfigError, RunError) as error:
        typer.echo(str(error), err=True)
        code = 2 if isinstance(error, ConfigError) else 1
    raise typer.Exit(code)
