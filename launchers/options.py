"""The options that the scripts share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from launchers.submission import Submission, Where
from megarl.launch.request import Request, Way, split_arguments

Executor = Annotated[Where, typer.Option(help="What runs the tasks: this machine, or the cluster of the profile.")]
ProfileFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="The cluster's profile, in place of ~/.config/megarl/cluster.yaml. Options given here go before it.",
    ),
]
Name = Annotated[str | None, typer.Option(help="Of the experiment; that of the last run.dir.")]
Nodes = Annotated[int | None, typer.Option(min=1, help="Nodes, as cluster.nodes=N.")]
GPUs = Annotated[int | None, typer.Option(min=1, help="GPUs of each, as cluster.devices_per_node=N.")]
Time = Annotated[str | None, typer.Option(help="Time limit of each job, as 04:00:00.")]
Partition = Annotated[str | None, typer.Option(help="Partition.")]
Account = Annotated[str | None, typer.Option(help="Account that is charged.")]
Python = Annotated[str | None, typer.Option(help="Interpreter that has megarl, where the runs are.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the scripts; write and submit nothing.")]
Detach = Annotated[bool, typer.Option("--detach", help="Return when the jobs are submitted.")]


def asked(
    arguments: list[str],
    *,
    executor: Where,
    profile: Path | None,
    name: str | None,
    nodes: int | None,
    gpus_per_node: int | None,
    time: str | None,
    partition: str | None,
    account: str | None,
    python: str | None,
    dry_run: bool,
    detach: bool,
    chain: bool = False,
    sweeps: list[str] | None = None,
    parallel: int | None = None,
) -> Submission:
    """What a command line asks for."""
    given = {"time": time, "partition": partition, "account": account, "runtime": python and {"python": python}}
    configs, overrides = split_arguments(arguments)
    request = Request(
        configs=configs,
        overrides=overrides,
        profile=profile,
        settings={key: value for key, value in given.items() if value is not None},
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        job_name=name,
        sweeps=tuple(sweeps or ()),
        parallel=parallel,
        dry_run=dry_run,
        way=Way.NONE if executor is Where.LOCAL else Way.TUNNEL,
    )
    return Submission(request=request, where=executor, chain=chain, detach=detach)


def run(main: Callable[..., None]) -> None:
    """Runs a script's command."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
