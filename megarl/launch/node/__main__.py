"""``python -m megarl.launch.node``: the command that a Slurm job starts on each of its nodes."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from megarl.launch.node.agent import AgentOptions, Worker, log, token_of
from megarl.launch.node.head import Head
from megarl.launch.node.slurm_job import SlurmJob

_OVERRIDES = typer.Argument(metavar="[KEY.PATH=VALUE]...", help="Settings to override.")
_INTERFACE = "Network interface between the nodes, such as ib0. Default: that of the route between them."
_START_LIMIT = "Seconds for the nodes to find each other, and again to start Ray."

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(context_settings={"allow_interspersed_args": False})
def node(
    command: Annotated[Literal["train", "eval"], typer.Argument(help="What to run.")],
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.")],
    overrides: Annotated[list[str] | None, _OVERRIDES] = None,
    interface: Annotated[str | None, typer.Option(help=_INTERFACE)] = None,
    start_limit: Annotated[float, typer.Option(help=_START_LIMIT)] = 600.0,
) -> None:
    """Run CONFIG on all nodes of a Slurm job step with one task per node: srun --ntasks-per-node=1 ...

    The first node starts Ray, waits for the other nodes and their devices, and runs megarl train or
    eval, whose exit code is the job's: 2 for a mistake in CONFIG, found before Ray starts; 1 if the
    run or a node fails. Nothing is left running on any node. Requires RAY_AUTH_TOKEN,
    a secret of the job.
    """
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
    options = AgentOptions(
        command=command,
        config=str(config),
        overrides=tuple(overrides or ()),
        interface=interface,
        start_limit_s=start_limit,
    )
    raise typer.Exit(run_agent(options))


def run_agent(options: AgentOptions) -> int:
    """Runs this node's agent; returns its exit code."""
    try:
        job = SlurmJob.of(os.environ)
        for handler in logging.getLogger().handlers:  # the nodes share the job's stderr
            handler.setFormatter(logging.Formatter(f"[{job.name}] %(message)s"))
        token = token_of(os.environ)
    except ValueError as error:
        log.error(error)
        return 2
    if job.index == 0:
        return Head(job, options, token).run()
    return Worker(job, options, token).run()


if __name__ == "__main__":
    app(prog_name="python -m megarl.launch.node")
