"""Runs recipes one after the other: ``python -m tests.e2e.recipe_runs DIRECTORY...``, each with its ``run.yaml``.

What a run prints goes into ``output.txt`` beside it; the exit status of each is a line of the output.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from megarl.cli import app


def main(*directories: str) -> None:
    """Runs them in this process, which imports the driver's packages once."""
    told = os.dup(1)
    for directory in map(Path, directories):
        with (directory / "output.txt").open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        try:
            app(["train", str(directory / "run.yaml")])
            status = None
        except SystemExit as end:
            status = end.code
        os.write(told, f"{status or 0}\n".encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
