"""Training of one role on a data set."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megarl.cluster.calls import rank0_result
from megarl.cluster.ray_worker import ChunkRefs
from megarl.cluster.session import Session
from megarl.config import TrainingConfig
from megarl.data.batches import on_all_tokens, text_batch
from megarl.data.schedule import step_schedule
from megarl.data.stream import Stream
from megarl.data.training_texts import TrainingText
from megarl.groups.trainers import close_all, launch_trainers
from megarl.loop.pass_meter import PassMeter
from megarl.loop.skipped_steps import SkippedBatches, write_rows
from megarl.loop.train import Trainer
from megarl.megatron.worker import MegatronWorker
from megarl.megatron.worker_requests import ForwardRequest, UpdateRequest
from megarl.preflight.datasets import Sets
from megarl.run.results import EvaluationResult, StepResult
from megarl.run.sinks import Metrics
from megarl.run.timers import Timers
from megarl.run.verdict import STANDARD_ERRORS
from megarl.types import SampleInfo, Schedule, TextChunk


class SupervisedTrainer(Trainer):
    """Trains one role, which always has the devices.

    Args:
        model_dir: Hugging Face directory of the model.
        phase: called with the name of each phase that begins.
        evaluate_every: steps between evaluations; None: before the first step and after the last.
        all_tokens: the loss includes the tokens of the prompts.
    """

    def __init__(
        self,
        config: TrainingConfig,
        session: Session,
        model_dir: str,
        data: Sets,
        phase: Callable[[str], None],
        *,
        evaluate_every: int | None,
        all_tokens: bool = False,
    ) -> None:
        self._config = config
        self._model_dir = model_dir
        self._phase = phase
        self._trainers = launch_trainers(config, session)
        self.roles = self._trainers.roles
        (role,) = config.trained
        self._role = self.roles[role]
        self._meter = PassMeter(config)
        self._skipped = SkippedBatches(config)
        self._layout = self._role.layout
        self._budget = config.role(role).tokens_per_micro_batch
        self._rows = Stream(data.rows["data.train"], config.run.seed)
        self._held_out = data.rows.get("data.evaluation")
        self._all_tokens = all_tokens
        self.evaluate_every = evaluate_every

    async def start(self) -> None:
        await self._trainers.start(self._model_dir)

    async def step(self, step: int) -> StepResult:
        timers = Timers()
        self._phase("update")
        with timers("step"):
            samples, texts, schedule = self._batch(self._rows.next(self._config.rows_per_step))
            chunks = await self.chunks_of(samples, texts, self._meter)
            request = UpdateRequest(schedules=(schedule,), chunks=chunks)
            call = self._role.dispatch(MegatronWorker.update, request)
            updates = await rank0_result(call)
        self._skipped.add(step, updates, partial(write_rows, step, samples))
        self._meter.add_update(self._role.name, (schedule,), await call.longest())
        seconds = timers.take()
        tokens_per_second = sum(sample.tokens for sample in samples) / seconds["time/step"]
        metrics = {
            "data/epochs": self._rows.epochs,
            **seconds,
            "perf/tokens_per_second": tokens_per_second,
            **self._meter.take(await self._trainers.take_usage()),
        }
        return StepResult(step=step, metrics=metrics, updates=updates)

    async def evaluate(self, step: int) -> EvaluationResult | None:
        """Computes the loss and its metrics on the held-out rows; an accuracy has a 95% interval."""
        if self._held_out is None:
            return None
        self._phase("evaluation")
        samples, texts, schedule = self._batch(self._held_out)
        request = ForwardRequest(schedule=schedule, chunks=await self.chunks_of(samples, texts, None))
        metrics = await rank0_result(self._role.dispatch(MegatronWorker.evaluate, request))
        accuracy = metrics.get("eval/accuracy")
        if accuracy is not None:
            error = math.sqrt(max(accuracy * (1 - accuracy), 0.0) / len(self._held_out))
            metrics["eval/accuracy_ci95"] = STANDARD_ERRORS * error
        return EvaluationResult(step=step, metrics={"eval/samples": len(self._held_out), **metrics})

    async def chunks_of(
        self, samples: Sequence[SampleInfo], chunks: Sequence[TextChunk], meter: PassMeter | None
    ) -> ChunkRefs[TextChunk]:
        """Returns the chunks of a step as its update reads them; a stage may add columns.

        Args:
            meter: counter of the step's passes; None in an evaluation.
        """
        return ChunkRefs[TextChunk].put(chunks)

    def _batch(self, rows: Sequence[TrainingText]) -> tuple[tuple[SampleInfo, ...], tuple[TextChunk, ...], Schedule]:
        samples, chunks = text_batch(rows, max(role.layout.dp for role in self.roles.values()))
        trained = on_all_tokens(samples) if self._all_tokens else samples
        schedule = step_schedule(trained, self._layout, self._budget, rows_per_unit=len(rows[0].responses))
        return samples, chunks, schedule

    def state(self, directory: Path) -> dict[str, Any]:
        """Returns the position in the rows; needs no files."""
        return {"rows": self._rows.state()}

    def load(self, state: Mapping[str, Any], directory: Path) -> None:
        self._rows.load(state["rows"])

    async def finish(self, export: Path) -> Metrics:
        self._phase("export")
        tokenizer = self._config.model.tokenizer_directory(self._model_dir)
        await self._role.call(MegatronWorker.export, str(export), tokenizer, self._model_dir)
        return {}

    async def close(self) -> None:
        await close_all(self._trainers)
