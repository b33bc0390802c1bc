"""One run as an experiment: PPO, or any other stage. ``python -m launchers.ppo configs/debug/ppo.yaml``"""

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
            help="YAML file of the run, and settings to override.",
        ),
    ],
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
    """Run CONFIG as an experiment of NeMo-Run, here or on a cluster."""
    raise typer.Exit(launch(options.asked(**locals())))


if __name__ == "__main__":
    options.run(main)
