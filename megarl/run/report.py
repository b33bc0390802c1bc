"""A run's reports: files in its directory, trackers, progress on the console, a summary at the end."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from rich.console import Console

from megarl.config import EvalConfig, PPOConfig, RAFTConfig, RunConfig, TrainingConfig
from megarl.data.sources import LeftOutRows
from megarl.files import write_durably
from megarl.run.directory import RunDirectory, RunPaths
from megarl.run.display import Display, open_display
from megarl.run.results import EvaluationResult, Metrics, StepResult
from megarl.run.samples import SampleWriter
from megarl.run.sinks import COLUMNS, JsonlSink, Sink, as_json, metrics_table
from megarl.run.trackers import TensorBoardSink, WandbSink

_SAMPLED: Final = "rollout/samples"
_UNSCORED: Final = "rewards/unscored"


def told_of_step(step: int, metrics: Mapping[str, float]) -> str | None:
    """A line about the responses of a step that have no score; None where all have one.

    Args:
        step: of the run.
        metrics: of the step.
    """
    if not metrics.get(_UNSCORED):
        return None
    of_sources = ", ".join(
        f"{name.removeprefix(f'{_UNSCORED}/')}: {count}"
        for name, count in metrics.items()
        if name.startswith(f"{_UNSCORED}/") and count
    )
    return f"step {step}: {metrics[_UNSCORED]} of {metrics[_SAMPLED]} responses have no score ({of_sources})"


def count_responses(metrics: Path) -> dict[str, int]:
    """How many responses a run has ``sampled``, and how many of them are ``unscored``; empty where it samples none.

    Args:
        metrics: the file with a line per step, which a run that goes on continues.
    """
    steps = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    of_samples = [step for step in steps if _UNSCORED in step]
    if not of_samples:
        return {}
    names = {"sampled": _SAMPLED, "unscored": _UNSCORED}
    return {name: sum(step[metric] for step in of_samples) for name, metric in names.items()}


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


_NOTHING: Final = LeftOutRows()


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A finished run, as summary.json has it, which leaves out what is empty.

    Args:
        stage: of training.
        steps: taken in all.
        seconds: of this process.
        start: metrics of the start, the first sync's for example.
        last_step: metrics of the last step that this process took.
        responses: of the whole run, how many were ``sampled``, and how many of them are ``unscored``.
        evaluation: metrics of its last evaluation.
        export: what is to be said of the exported model.
    """

    stage: str
    steps: int
    seconds: float
    start: Metrics = field(default_factory=dict)
    last_step: Metrics = field(default_factory=dict)
    responses: Mapping[str, int] = field(default_factory=dict)
    evaluation: Metrics = field(default_factory=dict)
    export: Metrics = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Writes summary.json."""
        told = {name: value for name, value in asdict(self).items() if value != {}}
        write_durably(path, json.dumps(as_json(told), indent=2) + "\n")


def read_summary(directory: RunDirectory) -> Summary:
    """The summary of a run that is finished; says how to go on all the same."""
    summary = Summary(**json.loads(directory.summary.read_text(encoding="utf-8")))
    print(
        f"{directory.path} is finished: it has taken its {summary.steps} steps. "
        "Raise run.steps to go on with it, or choose another run.dir for a new run.",
        flush=True,
    )
    return summary


class Reporter:
    """Writes what a run tells, from its start to its end or interruption; the last one to be closed.

    Args:
        config: of the run.
        directory: of the run.
        taken: steps that were taken before.
        left_out: rows of the data.
    """

    def __init__(
        self, config: TrainingConfig, directory: RunDirectory, taken: int, left_out: LeftOutRows = _NOTHING
    ) -> None:
        self._config, self._directory = config, directory
        self._left_out = left_out
        self._start: Metrics = {}
        self._last_step: Metrics = {}
        self._evaluation: Metrics = {}
        self._updates_per_step = config.updates_per_step
        self._taken = taken

    def __enter__(self) -> Self:
        config, directory = self._config, self._directory
        with ExitStack() as opened:
            self._metrics = JsonlSink(directory.metrics)
            self._updates = JsonlSink(directory.updates)
            for lines in (self._metrics, self._updates):
                opened.callback(lines.close)
            self._evaluations = opened.enter_context(EvaluationReporter(config, directory, taken=self._taken))
            print(_starting(config), flush=True)
            self._display = self._open_display()
            opened.callback(lambda: self._display.close())
            self._opened = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()
        if kind is not None and issubclass(kind, KeyboardInterrupt | SystemExit):
            steps = self._directory.checkpoints.steps()
            again = f"goes on after step {steps[-1]}, the last checkpoint's" if steps else "begins it again"
            print(f"interrupted; nothing of the run is left running. The same command {again}", file=sys.stderr)

    def _open_display(self) -> Display:
        columns = COLUMNS[self._config.stage]
        return open_display(self._config.stage, columns, steps=self._config.run.steps, done=self._taken)

    def phase(self, name: str) -> None:
        """Says what the run does now."""
        self._display.phase(name)

    def started(self, seconds: float, metrics: Metrics) -> None:
        """Says that everything runs.

        Args:
            metrics: of the start.
        """
        if self._left_out.rows:
            self._left_out.write(self._directory.left_out)
            print(self._left_out.message(self._directory.left_out), flush=True)
        again = f", going on after step {self._taken}" if self._taken else ""
        print(f"started in {seconds:.0f} s{again}; the processes print into {self._directory.logs}", flush=True)
        self._start = dict(metrics)

    def write(self, result: StepResult) -> None:
        """Writes a step."""
        metrics = {**self._left_out.metrics(), **result.all_metrics()}
        first = (result.step - 1) * self._updates_per_step + 1
        for number, update in enumerate(result.updates, start=first):
            self._updates.write(result.step, {"update": number, **update})
        if self._evaluations.samples is not None:
            self._evaluations.samples.write(result.step, "train", result.samples)
        for sink in (self._metrics, *self._evaluations.trackers, self._display):
            sink.write(result.step, metrics)
        line = told_of_step(result.step, metrics)
        if line is not None:
            print(line, flush=True)
        self._last_step = metrics

    def evaluated(self, result: EvaluationResult | None) -> None:
        """Writes an evaluation."""
        if result is None:
            return
        self._evaluations.write(result, f"evaluation after step {result.step}")
        self._evaluation = result.metrics

    def finished(self, export: Metrics, seconds: float) -> Summary:
        """Writes summary.json, prints the end of the run and returns it.

        Args:
            export: what is to be said of the exported model.
            seconds: of this process.
        """
        summary = Summary(
            stage=self._config.stage,
            steps=self._config.run.steps,
            seconds=seconds,
            start=self._start,
            last_step=self._last_step,
            responses=count_responses(self._directory.metrics),
            evaluation=self._evaluation,
            export=export,
        )
        summary.write(self._directory.summary)
        unscored = summary.responses.get("unscored", 0)
        without = f"{unscored} of {summary.responses['sampled']} responses had no score; " if unscored else ""
        told = f"{summary.steps} steps in {seconds:.0f} s; {without}the model is in {self._directory.export}"
        print(told, flush=True)
        return summary


def _starting(config: TrainingConfig) -> str:
    """What is starting: models may take minutes to load."""
    processes = sum(len(config.device_list(group)) for group in config.groups)
    if isinstance(config, PPOConfig | RAFTConfig):
        processes += config.rollout.engines
    cluster = config.cluster
    if cluster.address is None:
        return f"starting Ray and {processes} processes"
    return f"starting {processes} processes on {cluster.nodes} node{'s' if cluster.nodes > 1 else ''}"
