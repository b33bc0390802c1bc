"""Runs that follow each other as one experiment: SFT, a reward model, PPO."""

from __future__ import annotations

from typing import Annotated

import typer

from launchers import options
from launchers.submission import Where, launch


def main(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG... [KEY.PATH=VALUE]...",
            show_default=False,
            help="YAML files of the runs in their order, and settings to override in all of them.",
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
    """Run each CONFIG after the one before, as one experiment of NeMo-Run: SFT, a reward model, PPO.

    A later configuration names what an earlier one will export, such as runs/sft/export. It is checked as far as that
    is possible at once, and wholly when its turn comes. What comes after a failed run does not start.
    """
    raise typer.Exit(launch(options.asked(**locals(), chain=True)))


if __name__ == "__main__":
    options.run(main)
