"""Experiment trackers: TensorBoard and Weights & Biases."""

from __future__ import annotations

import importlib.util
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.run.sinks import Metrics

_FLUSH_S = 10


class TensorBoardSink:
    """Writes a file of events into a directory, which is created, beside those of earlier attempts.

    Args:
        first_step: TensorBoard discards events of earlier files from this step on.
    """

    def __init__(self, directory: str | Path, *, first_step: int = 1) -> None:
        from tensorboardX import SummaryWriter  # it imports torch

        # The default name has the time in whole seconds; a run may resume within one.
        suffix = f".from-{first_step}"
        self._writer = SummaryWriter(str(directory), purge_step=first_step, flush_secs=_FLUSH_S, filename_suffix=suffix)

    def write(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


_ID_FILE = "wandb_id"


def has_wandb() -> bool:
    """Whether the package wandb is installed."""
    return importlib.util.find_spec("wandb") is not None


class WandbSink:
    """Logs to a run of Weights & Biases, the same one after a resume.

    wandb starts a process, which ends when the sink is closed. Its environment variables apply: with
    `WANDB_MODE=offline` everything stays in the directory.

    Args:
        directory: of the run; has wandb's files and the id of its run.
        config: of the run, as plain values.

    Raises:
        ValueError: the package wandb is not installed.
    """

    def __init__(self, project: str, directory: Path, *, config: Mapping[str, Any]) -> None:
        if not has_wandb():
            raise ValueError(
                f"tracking.wandb_project = {project}: needs the package wandb; "
                "install it with pip install 'megarl[wandb]', or set tracking.wandb_project to null"
            )
        import wandb

        self._wandb = wandb
        self._run = wandb.init(
            project=project,
            name=directory.absolute().name,
            dir=str(directory),
            id=_run_id(directory / _ID_FILE),
            resume="allow",
            config=dict(config),
            settings=wandb.Settings(console="off", silent=True),
        )

    def write(self, step: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Uploads what is pending, and ends wandb's process."""
        self._run.finish()
        self._wandb.teardown()


def _run_id(file: Path) -> str:
    """The id in the file, which is created the first time."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(secrets.token_hex(4), encoding="utf-8")
    return file.read_text(encoding="utf-8")
