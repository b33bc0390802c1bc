"""Sinks of metrics: files of JSON lines, TensorBoard, Weights & Biases."""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, Final, Protocol

Metrics = Mapping[str, float]

WRITTEN: Final = "time/written"
"""The time of writing in each line, seconds since 1970."""
_FLUSH_S = 10


class Sink(Protocol):
    """A receiver of the metrics of each step."""

    def write(self, step: int, metrics: Metrics) -> None:
        """Writes the metrics of a step; steps come in ascending order."""
        ...

    def close(self) -> None:
        """Writes what is pending and releases everything."""
        ...


class JsonlSink:
    """Appends a JSON object per call to a file, flushed: `step` first. Numbers that are not finite become null.

    Args:
        path: its directory is created.
        clock: seconds since 1970, the last entry of each object; None leaves it out.
    """

    def __init__(self, path: Path, clock: Callable[[], float] | None = time.time) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file, self._clock = path.open("a", encoding="utf-8"), clock

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        written = {} if self._clock is None else {WRITTEN: self._clock()}
        entries = as_json({"step": step, **metrics, **written})
        self._file.write(json.dumps(entries, allow_nan=False, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def as_json(value: Any) -> Any:
    """Returns a value that JSON can express: numpy's numbers as plain ones, numbers that are not finite as null."""
    if isinstance(value, Mapping):
        return {str(name): as_json(entry) for name, entry in value.items()}
    if isinstance(value, bool | str) or value is None:
        return value
    if isinstance(value, Sequence):
        return [as_json(entry) for entry in value]
    if isinstance(value, Integral):
        return int(value)
    return float(value) if math.isfinite(value) else None


class TensorBoardSink:
    """Writes an event file into a directory, which is created, beside those of earlier attempts.

    Args:
        first_step: TensorBoard discards events of earlier files from this step on.
    """

    def __init__(self, directory: Path, *, first_step: int = 1) -> None:
        from tensorboardX import SummaryWriter  # it imports torch

        # The default name has the time in whole seconds; a run may resume within one.
        suffix = f".from-{first_step}"
        self._writer = SummaryWriter(str(directory), purge_step=first_step, flush_secs=_FLUSH_S, filename_suffix=suffix)

    def write(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Logs to a run of Weights & Biases, the same one after a resume; `config` has its configuration.

    wandb starts a process, which ends when the sink is closed. Its environment variables apply: with
    `WANDB_MODE=offline` everything stays in the directory, which also has the id of its run.
    """

    def __init__(self, project: str, directory: Path, *, config: Mapping[str, Any]) -> None:
        import wandb

        id_file = directory / "wandb_id"
        if not id_file.exists():
            directory.mkdir(parents=True, exist_ok=True)
            id_file.write_text(secrets.token_hex(4), encoding="utf-8")
        self._wandb = wandb
        self._run = wandb.init(
            project=project,
            name=directory.absolute().name,
            dir=str(directory),
            id=id_file.read_text(encoding="utf-8"),
            resume="allow",
            config=dict(config),
            settings=wandb.Settings(console="off", silent=True),
        )
        # wandb's own steps must not go back, as those of evaluations beside the training do, and of a resumed run.
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Metrics) -> None:
        self._run.log({**metrics, "step": step})

    def close(self) -> None:
        """Uploads what is pending, and ends wandb's process."""
        self._run.finish()
        self._wandb.teardown()
