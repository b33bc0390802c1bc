"""Metrics as TensorBoard events."""

from __future__ import annotations

from pathlib import Path

from megarl.obs.metrics import Metrics

_FLUSH_S = 10


class TensorBoardSink:
    """Writes a file of events into a directory, beside those of earlier runs.

    Args:
        directory: of the events; it is made.
        first_step: that this run writes: TensorBoard forgets what earlier files say of it and of later ones.
    """

    def __init__(self, directory: str | Path, *, first_step: int = 1) -> None:
        from tensorboardX import SummaryWriter  # it imports torch

        # The name has whole seconds in it, within which a run may have been resumed.
        suffix = f".from-{first_step}"
        self._writer = SummaryWriter(str(directory), purge_step=first_step, flush_secs=_FLUSH_S, filename_suffix=suffix)

    def write(self, step: int, metrics: Metrics) -> None:
        """Writes an event per metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes what is left and ends the writer's thread."""
        self._writer.close()
