"""Runs that follow each other as one experiment: SFT, a reward model, PPO."""

from __future__ import annotations

from typing import Annotated

import typer

from launchers.submission import run_script, script

_CONFIGS = typer.Argument(
    metavar="CONFIG... [KEY.PATH=VALUE]...",
    show_default=False,
    help="YAML files of the runs in their order, and settings to override in all of them.",
)


@script(chain=True)
def main(arguments: Annotated[list[str], _CONFIGS]) -> None:
    """Run each CONFIG after the one before, as one experiment of NeMo-Run: SFT, a reward model, PPO.

    A later configuration may name what an earlier one will export, such as runs/sft/export. It is checked as far as
    possible now, and completely when it starts. Runs after a failed one do not start.
    """


if __name__ == "__main__":
    run_script(main)
