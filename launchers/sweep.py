"""Every combination of some values as a run of its own, in one experiment."""

from __future__ import annotations

from typing import Annotated

import typer

from launchers.submission import run_script, script

_CONFIG = typer.Argument(
    metavar="CONFIG [KEY.PATH=VALUE]...",
    show_default=False,
    help="YAML file of the runs, and settings to override in all of them.",
)
_SWEEP = typer.Option(
    "--sweep",
    metavar="KEY.PATH=VALUE,...",
    help="A run for each value, in directories below run.dir; repeatable: a run for each combination.",
)
_PARALLEL = typer.Option(min=1, help="Runs at the same time: here 1, on a cluster all.", show_default=False)


@script()
def main(
    arguments: Annotated[list[str], _CONFIG],
    sweeps: Annotated[list[str], _SWEEP],
    parallel: Annotated[int | None, _PARALLEL] = None,
) -> None:
    """Run CONFIG for every combination of values, as one experiment of NeMo-Run.

    Each run has a directory of its own below run.dir. A failed one does not keep the others from running.
    """


if __name__ == "__main__":
    run_script(main)
