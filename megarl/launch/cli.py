"""``megarl launch``: a run as a job of a cluster."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from megarl.launch.ray_command import ray
from megarl.launch.slurm_command import slurm


class LaunchGroup(TyperGroup):
    """A configuration alone does not say where it is to run."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands and not args[0].startswith("-"):
            ways = "|".join(self.commands)
            ctx.fail(f"{args[0]} is none of {ways}; write megarl launch {ways} CONFIG")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="launch",
    cls=LaunchGroup,
    help="Run on a cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("slurm")(slurm)
app.command("ray")(ray)
