"""``python -m megarl.launch.node``: the command that a job starts on each of its nodes."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from megarl.launch.node.agent import Agent, Options, log, name_messages, token_of
from megarl.launch.node.head import Head
from megarl.launch.node.slurm_job import SlurmJob
from megarl.launch.node.worker import Worker


class Command(StrEnum):
    """What the driver runs."""

    TRAIN = "train"
    EVAL = "eval"


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(context_settings={"allow_interspersed_args": False})
def node(
    command: Annotated[Command, typer.Argument(help="What to run.")],
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY.PATH=VALUE]...", help="Settings to override.")
    ] = None,
    interface: Annotated[
        str | None,
        typer.Option(help="Network interface of the run, such as ib0. Default: that of the route between the nodes."),
    ] = None,
    start_limit: Annotated[
        float, typer.Option(help="How long the nodes may take to come together, and Ray on them to start, seconds.")
    ] = 600.0,
) -> None:
    """Run CONFIG on all nodes of a Slurm job step that has one task on each: srun --ntasks-per-node=1 ...

    The first node starts Ray, waits for the others and their devices, and then runs megarl train, or eval, whose exit
    code is the job's: 2 for a mistake in CONFIG, found before Ray starts; 1 where the run or one of its nodes failed.
    However it ends, nothing is left running on any node. It needs RAY_AUTH_TOKEN, a secret of the job's own.
    """
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
    options = Options(
        command=command,
        config=str(config),
        overrides=(*(overrides or ()),),
        interface=interface,
        start_limit_s=start_limit,
    )
    raise typer.Exit(asyncio.run(run(options)))


async def run(options: Options) -> int:
    """What the node has to do in its job; its exit code."""
    try:
        job = SlurmJob.of(os.environ)
        name_messages(job.name)
        token = token_of(os.environ)
    except ValueError as error:
        log.error(error)
        return 2
    agent = Agent(job, options, token)
    agent.listen_for_signals()
    return await (Head(agent) if job.index == 0 else Worker(agent)).run()


if __name__ == "__main__":
    app(prog_name="python -m megarl.launch.node")
