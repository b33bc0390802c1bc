"""A run's reports: files in its directory, trackers, progress on the console, a summary at the end."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

from rich.console import Console

from megarl.config import RunConfig, SamplingConfig, TrainingConfig, plain
from megarl.data.sources import LeftOutRows
from megarl.errors import RunError
from megarl.files import read_lines, write_durably
from megarl.run.attempts import read_attempts
from megarl.run.directory import RunDirectory
from megarl.run.display import COLUMNS, Column, Display, metrics_table, phase_line
from megarl.run.health import HealthFinding, HealthMonitor, shown_limits
from megarl.run.paths import RunPaths
from megarl.run.results import EvaluationResult, ShownSample, StepResult
from megarl.run.sinks import (
    JsonlSink,
    Metrics,
    SampleSink,
    Sink,
    TensorBoardSink,
    as_json,
    open_mlflow,
    open_trackio,
    open_wandb,
)
from megarl.run.timers import process_age
from megarl.run.trace import Trace
from megarl.run.verdict import judge
from megarl.texts import counted
from megarl.weights.peft_files import adapter_export

_TABLE_WIDTH = 120
"""Columns of a table outside a terminal."""


class EvaluationReporter:
    """Writes evaluations, and opens the sinks that they share with a run's other reports.

    Earlier attempts have taken `taken` steps.
    """

    def __init__(self, config: RunConfig, paths: RunPaths, *, taken: int = 0) -> None:
        self._config = config
        self._paths = paths
        self._taken = taken
        self._samples: SampleSink | None = None  # None in stages that do not sample
        self._prompts: JsonlSink | None = None
        self.trackers: list[Sink] = []
        self.console = Console(highlight=False)  # another one would print over a live display

    def __enter__(self) -> Self:
        paths = self._paths
        with ExitStack() as opened:
            self._lines = opened.enter_context(closing(JsonlSink(paths.evaluations)))
            if isinstance(self._config, SamplingConfig):
                limit = self._config.tracking.samples_mib << 20
                self._samples = opened.enter_context(closing(SampleSink(paths.samples, limit)))
                self._prompts = opened.enter_context(closing(JsonlSink(paths.prompt_scores, clock=None)))
            for sink in self._open_trackers():
                self.trackers.append(opened.enter_context(closing(sink)))
            self._opened = opened.pop_all()
        return self

    def _open_trackers(self) -> Iterator[Sink]:
        tracking = self._config.tracking
        if tracking.tensorboard:
            first = self._taken + 1 if self._taken else 0
            yield TensorBoardSink(self._paths.tensorboard, first_step=first)
        services = [
            ("wandb_project", tracking.wandb_project, open_wandb),
            ("mlflow_experiment", tracking.mlflow_experiment, open_mlflow),
            ("trackio_project", tracking.trackio_project, open_trackio),
        ]
        for name, project, open_sink in services:
            if project is None:
                continue
            try:
                sink = open_sink(project, self._paths.path, plain(self._config))
            except Exception as error:  # whatever the package of a service raises
                problem = f"tracking.{name} = {project}: {error}"
                raise RunError(f"{problem}; correct that, or set it to null") from error
            yield sink

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def write(self, result: EvaluationResult, title: str) -> None:
        """Writes an evaluation, and prints it below a title."""
        self._lines.write(result.step, result.metrics)
        self.write_samples(result.step, "evaluation", result.samples)
        if self._prompts is not None:
            for prompt, scores in result.prompts.items():
                self._prompts.write(result.step, {"prompt_id": prompt, "scores": scores})
        for sink in self.trackers:
            sink.write(result.step, result.metrics)
        self.console.print(title, markup=False, soft_wrap=True)
        width = None if self.console.is_terminal else _TABLE_WIDTH
        self.console.print(metrics_table(result.metrics), width=width)

    def write_samples(self, step: int, kind: Literal["train", "evaluation"], samples: Iterable[ShownSample]) -> None:
        """Writes the samples of a step, or of the evaluation after it."""
        if self._samples is not None:
            self._samples.write(step, kind, (_fields(sample) for sample in samples))


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The summary of a finished run: summary.json, which omits empty entries.

    Args:
        seconds: duration of the last attempt.
        start: metrics of the start, such as those of the first sync.
        responses: numbers of `sampled` and `unscored` responses in all attempts.
        evaluation: metrics of the last evaluation.
        export: metrics of the exported model.
        findings: findings of the health checks; `last` is null if one lasted to the end.
    """

    stage: str
    steps: int
    seconds: float
    start: Metrics = field(default_factory=dict)
    last_step: Metrics = field(default_factory=dict)
    responses: Mapping[str, int] = field(default_factory=dict)
    evaluation: Metrics = field(default_factory=dict)
    export: Metrics = field(default_factory=dict)
    findings: Sequence[Mapping[str, str | int | None]] = ()
    verdict: str = ""

    def write(self, path: Path) -> None:
        entries = {name: value for name, value in asdict(self).items() if value not in ({}, (), [], "")}
        write_durably(path, json.dumps(as_json(entries), indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls(**json.loads(path.read_text(encoding="utf-8")))


class Reporter:
    """Writes the reports of a training run, up to its end or interruption."""

    def __init__(
        self,
        config: TrainingConfig,
        directory: RunDirectory,
        taken: int,
        left_out: LeftOutRows | None = None,
        clock: Callable[[], float] = process_age,
    ) -> None:
        self._config = config
        self._directory = directory
        self._taken = taken
        self._clock = clock
        self._started = False
        self._left_out = left_out or LeftOutRows()
        self._start: Metrics = {}
        self._last_step: Metrics = {}
        self._evaluation: Metrics = {}
        self._health = HealthMonitor(read_lines(directory.metrics), config.health.limits)

    def __enter__(self) -> Self:
        config = self._config
        directory = self._directory
        with ExitStack() as opened:
            self._metrics = opened.enter_context(closing(JsonlSink(directory.metrics)))
            self._updates = opened.enter_context(closing(JsonlSink(directory.updates)))
            self._evaluations = opened.enter_context(EvaluationReporter(config, directory, taken=self._taken))
            self.trace = opened.enter_context(closing(Trace(directory.trace, read_attempts(directory.attempts))))
            console = self._evaluations.console
            display = Display(config.stage, run_columns(config), steps=config.steps, console=console, done=self._taken)
            self._display = opened.enter_context(closing(display))
            self._opened = opened.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._opened.close()
        if kind is not None and issubclass(kind, KeyboardInterrupt | SystemExit):
            steps = self._directory.checkpoints.steps()
            again = f"resumes after step {steps[-1]}, that of the last checkpoint" if steps else "starts it again"
            print(f"interrupted; nothing of the run is left running. The same command {again}", file=sys.stderr)

    def phase(self, name: str) -> None:
        """Shows what the run does from now on; during the start, also in a line with the clock."""
        self._display.phase(name)
        self.trace.phase(name)
        if not self._started:
            print(phase_line(name, self._clock()), flush=True)

    def started(self, metrics: Metrics) -> None:
        """Reports that all processes run, and keeps the metrics of the start."""
        if self._left_out.rows:
            self._left_out.write(self._directory.left_out)
            print(self._left_out.message(self._directory.left_out), flush=True)
        resumed = f", resuming after step {self._taken}" if self._taken else ""
        print(f"started in {self._clock():.0f} s{resumed}", flush=True)
        print(f"the processes print into {self._directory.logs}", flush=True)
        self._started = True
        self._start = dict(metrics)

    def write(self, result: StepResult) -> None:
        metrics = {**self._left_out.metrics(), **result.all_metrics()}
        self.trace.end(metrics)
        first = (result.step - 1) * self._config.updates_per_step + 1
        for number, update in enumerate(result.updates, start=first):
            self._updates.write(result.step, {"update": number, **update})
        self._evaluations.write_samples(result.step, "train", result.samples)
        for sink in (self._metrics, *self._evaluations.trackers, self._display):
            sink.write(result.step, metrics)
        for message in self._health.add(as_json({"step": result.step, **metrics})):
            print(message, flush=True)
        self._last_step = metrics

    def alarm(self, step: int) -> HealthFinding | None:
        """Returns a finding of `health.stop` that began with a step."""
        return self._health.finding_at(step, self._config.health.stop)

    def evaluated(self, result: EvaluationResult | None) -> None:
        """Writes an evaluation, if there was one; raises RunError if it lacks the metric of checkpoint.best."""
        if result is None:
            return
        self._evaluations.write(result, f"evaluation after step {result.step}")
        self._evaluation = result.metrics
        best = self._config.checkpoint.best
        if best is not None and best.metric not in result.metrics:
            names = ", ".join(sorted(result.metrics))
            rule = f"checkpoint.best.metric = {best.metric}: a metric of the evaluations, which are {names}"
            raise RunError(f"{rule}; choose one of them, and start the run again")

    def finished(self, export: Metrics) -> Summary:
        """Writes and returns the summary with the export's metrics, and prints it."""
        seconds = self._clock()
        lines = read_lines(self._directory.metrics)
        findings: list[dict[str, str | int | None]] = []
        for each in self._health.findings:
            findings.append({"metric": each.check.metric, "first": each.first, "last": each.last, "text": each.text})
        summary = Summary(
            stage=self._config.stage,
            steps=self._config.steps,
            seconds=seconds,
            start=self._start,
            last_step=self._last_step,
            responses=_count_responses(lines),
            evaluation=self._evaluation,
            export=export,
            findings=findings,
            verdict=judge(lines, read_lines(self._directory.evaluations), self._health.findings),
        )
        summary.write(self._directory.summary)
        self._display.close()
        parts = [f"{counted(summary.steps, 'step')} in {seconds:.0f} s"]
        if summary.responses.get("unscored"):
            parts.append("{unscored} of {sampled} responses had no score".format(**summary.responses))
        model = self._directory.export
        adapters = adapter_export(model)
        if adapters.exists() and not model.exists():
            parts.append(f"the adapters are in {adapters}")
        else:
            parts.append(f"the model is in {model}")
        print("; ".join(parts), flush=True)
        if summary.verdict:
            print(summary.verdict, flush=True)
        if self._evaluations.console.is_terminal:
            print(f"megarl view {shlex.quote(str(self._directory.path))}  # its curves and samples", flush=True)
        return summary


def run_columns(config: TrainingConfig) -> dict[str, Column]:
    """Returns the columns of the metrics that a run has, with the limits of healthy values in place of units."""
    limits = shown_limits(config.health.limits)
    columns: dict[str, Column] = {}
    for metric in config.shown_metrics:
        column = COLUMNS[metric]
        columns[metric] = replace(column, unit=limits.get(metric, column.unit))
    return columns


def processes(config: TrainingConfig) -> str:
    """Returns the number of the run's trainers and engines, and of the nodes, in words."""
    count = sum(len(config.device_list(group)) for group in config.groups)
    if config.engine_settings is not None:
        count += config.engine_settings.engines
    text = counted(count, "process")
    if config.cluster.address is not None:
        text += f" on {counted(config.cluster.nodes, 'node')}"
    return text


def _fields(sample: ShownSample) -> dict[str, Any]:
    """Returns the fields of a sample in the file, without optional ones that it lacks."""
    fields = asdict(sample)
    for name in ("tokens", "turns", "outcome"):
        if fields[name] is None:
            del fields[name]
    return fields


def _count_responses(lines: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Returns the totals of all steps; none in a stage that samples no responses."""
    steps = [line for line in lines if "rewards/unscored" in line]
    if not steps:
        return {}
    sampled = sum(line["rollout/samples"] for line in steps)
    unscored = sum(line["rewards/unscored"] for line in steps)
    return {"sampled": sampled, "unscored": unscored}
