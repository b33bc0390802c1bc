"""Every combination of some values as a run of its own, in one experiment."""

from __future__ import annotations

from typing import Annotated

import typer

from launchers import options
from launchers.submission import Where, launch


def main(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG [KEY.PATH=VALUE]...",
            show_default=False,
            help="YAML file of the runs, and settings to override in all of them.",
        ),
    ],
    sweeps: Annotated[
        list[str],
        typer.Option(
            "--sweep",
            metavar="KEY.PATH=VALUE,...",
            help="A run for each value, in directories below run.dir; repeatable: a run for each combination.",
        ),
    ],
    parallel: Annotated[
        int | None, typer.Option(min=1, help="Runs at the same time: here 1, on a cluster all.", show_default=False)
    ] = None,
    executor: options.Executor = Where.LOCAL,
    profile: options.ProfileFile = None,
    name: options.Name = None,
    nodes: options.Nodes = None,
    gpus_per_node: options.GPUs = None,
    time: options.Time = None,
    partition: options.Partition = None,
    account: options.Account = None,
    python: options.Python = None,
    dry_run: options.DryRun = False,
    detach: options.Detach = False,
) -> None:
    """Run CONFIG for every combination of values, as one experiment of NeMo-Run.

    Each run has a directory of its own below run.dir. A failed one does not keep the others from running.
    """
    raise typer.Exit(launch(options.asked(**locals())))


if __name__ == "__main__":
    options.run(main)
