"""Runs the stages of the demo: each is ``megarl train`` of its file in configs/demo, in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Final

from rich.console import Console

CONFIGS: Final = Path("configs/demo")


class StageError(RuntimeError):
    """A stage did not end well; it has said why.

    Args:
        stage: its name.
        status: its exit status.
    """

    def __init__(self, stage: str, status: int) -> None:
        super().__init__(f"the stage {stage} ended with status {status}")
        self.status = status


def train(stage: str, overrides: Sequence[str], environment: Mapping[str, str], console: Console) -> None:
    """Runs one stage to its end; its progress is what it prints itself.

    Args:
        stage: name of its file, without the ending.
        overrides: ``key.path=value``.
        environment: of its process.
        console: where the command is told.

    Raises:
        StageError: it failed.
    """
    arguments = ["train", str(CONFIGS / f"{stage}.yaml"), *overrides]
    console.print(f"\nmegarl {' '.join(arguments)}", style="bold", markup=False, soft_wrap=True)
    process = subprocess.Popen([sys.executable, "-m", "megarl", *arguments], env=dict(environment))
    try:
        status = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    if status:
        raise StageError(stage, status)


def raise_on_sigterm() -> None:
    """Lets SIGTERM end the stage in progress too."""
    signal.signal(signal.SIGTERM, _terminate)


def _terminate(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
