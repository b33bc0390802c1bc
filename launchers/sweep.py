"""Every combination of some values as a run of its own, in one experiment."""

from __future__ import annotations

from typing import Annotated

import typer

from launchers.submission import run_script, script
from megarl.launch.cli import SWEEP

_CONFIG = typer.Argument(
    metavar="CONFIG [KEY.PATH=VALUE]...",
    show_default=False,
    help="YAML file of the runs, and settings to override in all of them.",
)
_PARALLEL = typer.Option(min=1, help="Runs at the same time; default: 1 here, all on a cluster.", show_default=False)


@script()
def main(
    arguments: Annotated[list[str], _CONFIG],
    sweep: Annotated[list[str], SWEEP],
    parallel: Annotated[int | None, _PARALLEL] = None,
) -> None:
    """Run CONFIG for every combination of values, as one experiment of NeMo-Run.

    Each run has its own directory below run.dir. The other runs go on if one fails.
    """


if __name__ == "__main__":
    run_script(main)
