"""One run of any stage as an experiment: ``python -m launchers.ppo configs/debug/ppo.yaml``."""

from __future__ import annotations

from typing import Annotated

import typer

from launchers.submission import run_script, script

_CONFIG = typer.Argument(
    metavar="CONFIG [KEY.PATH=VALUE]...", show_default=False, help="YAML file of the run, and settings to override."
)


@script()
def main(arguments: Annotated[list[str], _CONFIG]) -> None:
    """Run CONFIG as an experiment of NeMo-Run, here or on a cluster."""


if __name__ == "__main__":
    run_script(main)
