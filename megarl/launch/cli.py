"""``megarl launch``: a run as a job of a cluster."""

from __future__ import annotations

import typer

from megarl.launch.ray_command import ray
from megarl.launch.slurm_command import slurm

app = typer.Typer(
    name="launch",
    help="Run on a cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("slurm")(slurm)
app.command("ray")(ray)
