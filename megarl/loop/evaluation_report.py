"""Where evaluations go: a file of lines, samples to read, the trackers, and a table on the console."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Self

from rich.console import Console

from megarl.config import EvalConfig, PPOConfig, RAFTConfig, RunConfig
from megarl.loop.directory import RunPaths
from megarl.loop.stage import EvaluationResult
from megarl.obs.metrics import JsonlSink, Sink
from megarl.obs.samples import SampleWriter
from megarl.obs.table import metrics_table
from megarl.obs.tensorboard import TensorBoardSink
from megarl.obs.wandb import WandbSink

_WIDTH = 120
"""Columns of a table that no terminal shows."""


class EvaluationReporter:
    """Writes evaluations; has what other reports of a run share with them.

    Args:
        config: of the run.
        directory: of the run.
        taken: steps that were taken before.
    """

    samples: SampleWriter | None = None
    """Of the stages that generate."""

    def __init__(self, config: RunConfig, directory: RunPaths, *, taken: int = 0) -> None:
        self._config, self._directory, self._taken = config, directory, taken
        self.trackers: list[Sink] = []

    def __enter__(self) -> Self:
        config, directory, tracking = self._config, self._directory, self._config.tracking
        with ExitStack() as opened:
            self._lines = JsonlSink(directory.evaluations)
            opened.callback(self._lines.close)
            if isinstance(config, PPOConfig | RAFTConfig | EvalConfig):
                self.samples = SampleWriter(directory.samples)
                opened.callback(self.samples.close)
            if tracking.tensorboard:
                first = self._taken + 1 if self._taken else 0
                self.trackers.append(TensorBoardSink(directory.tensorboard, first_step=first))
            if tracking.wandb_project is not None:
                plain = config.model_dump(mode="json", by_alias=True)
                self.trackers.append(WandbSink(tracking.wandb_project, directory.path, config=plain))
            for sink in self.trackers:
                opened.callback(sink.close)
            self._opened = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()

    def write(self, result: EvaluationResult, title: str) -> None:
        """Writes an evaluation, and shows it under a title."""
        self._lines.write(result.step, result.metrics)
        if self.samples is not None:
            self.samples.write(result.step, "evaluation", result.samples)
        for sink in self.trackers:
            sink.write(result.step, result.metrics)
        console = Console(highlight=False)
        console.print(title, markup=False, soft_wrap=True)
        console.print(metrics_table(result.metrics), width=None if console.is_terminal else _WIDTH)
