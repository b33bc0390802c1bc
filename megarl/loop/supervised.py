"""Training of one role on the rows of a data set: supervised fine-tuning, and the base of reward modelling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megarl.cluster.calls import rank0_result
from megarl.cluster.ray_worker import ChunkRefs
from megarl.cluster.session import Session
from megarl.cluster.trainers import launch_trainers
from megarl.config import RewardModelConfig, SFTConfig
from megarl.data.batches import on_all_tokens, text_batch
from megarl.data.demonstrations import Demonstration
from megarl.data.preferences import Preference
from megarl.data.schedule import step_schedule
from megarl.data.stream import Stream, StreamState
from megarl.megatron.worker import MegatronWorker
from megarl.megatron.worker_requests import ForwardRequest, UpdateRequest
from megarl.preflight.datasets import TextSets
from megarl.run.directory import RunDirectory, model_directory
from megarl.run.results import EvaluationResult, StepResult
from megarl.run.sinks import Metrics
from megarl.run.timers import Timers
from megarl.types import RoleName, SampleInfo, Schedule, TextChunk


@dataclass(frozen=True, kw_only=True)
class Task:
    """The role that is trained, and its data.

    Args:
        held_out: None without any.
        rows_per_step: demonstrations or preferences.
        sequences_per_row: 1, or the responses of a preference.
        all_tokens: whether the loss is on the tokens of the prompts as well.
    """

    role: RoleName
    train: Sequence[Demonstration] | Sequence[Preference]
    held_out: Sequence[Demonstration] | Sequence[Preference] | None
    rows_per_step: int
    sequences_per_row: int = 1
    all_tokens: bool = False


class SupervisedTrainer:
    """Trains one role.

    Args:
        phase: called with each phase's name.
    """

    def __init__(
        self,
        config: SFTConfig | RewardModelConfig,
        session: Session,
        directory: RunDirectory,
        phase: Callable[[str], None],
        task: Task,
    ) -> None:
        self._config, self._session, self._phase = config, session, phase
        self._model_dir = model_directory(config, directory.path)
        self._trainers = launch_trainers(config, session)
        self.roles = self._trainers.roles
        self._role = self.roles[task.role]
        self._layout, self._budget = config.layout(task.role), config.role(task.role).tokens_per_micro_batch
        self._task, self._rows = task, Stream(task.train, config.run.seed)
        self.evaluate_every = config.data.evaluate_every

    def start(self) -> None:
        """Starts the trainers and loads the model."""
        self._trainers.start(self._model_dir)

    def begin(self, step: int) -> Metrics:
        """Does nothing."""
        del step
        return {}

    def step(self, step: int) -> StepResult:
        """Takes an optimizer step."""
        timers = Timers()
        self._phase("update")
        with timers("step"):
            samples, chunks, schedule = self._batch(self._rows.next(self._task.rows_per_step))
            request = UpdateRequest(schedules=(schedule,), chunks=chunks)
            updates = rank0_result(self._role.dispatch(MegatronWorker.update, request))
        seconds = timers.take()
        tokens = sum(sample.tokens for sample in samples)
        metrics = {
            "data/epochs": self._rows.epochs,
            **seconds,
            "perf/tokens_per_second": tokens / seconds["time/step"],
        }
        return StepResult(step=step, metrics=metrics, updates=updates)

    def evaluate(self, step: int) -> EvaluationResult | None:
        """The loss and its metrics on the held-out rows."""
        if self._task.held_out is None:
            return None
        self._phase("evaluation")
        _, chunks, schedule = self._batch(self._task.held_out)
        request = ForwardRequest(schedule=schedule, chunks=chunks)
        metrics = rank0_result(self._role.dispatch(MegatronWorker.evaluate, request))
        return EvaluationResult(step=step, metrics={"eval/samples": len(self._task.held_out), **metrics})

    def _batch(self, rows: Sequence[Any]) -> tuple[tuple[SampleInfo, ...], ChunkRefs[TextChunk], Schedule]:
        samples, chunks = text_batch(rows, self._layout.dp)
        trained = on_all_tokens(samples) if self._task.all_tokens else samples
        schedule = step_schedule(trained, self._layout, self._budget, rows_per_unit=self._task.sequences_per_row)
        return samples, self._session.share(chunks), schedule

    def to_training(self) -> None:
        """Does nothing: the trained role always has the devices."""

    def state(self) -> dict[str, Any]:
        """The position in the rows."""
        return {"rows": asdict(self._rows.state())}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores ``state()``."""
        self._rows.load(StreamState(**state["rows"]))

    def finish(self, export: Path) -> Metrics:
        """Writes the trained role."""
        self._phase("export")
        template = self._config.model.tokenizer or self._model_dir
        self._role.call(MegatronWorker.export, str(export), template).wait()
        return {}

    def close(self) -> None:
        """Lets every process end by itself."""
        self._trainers.close()


class SFTTrainer(SupervisedTrainer):
    """Supervised fine-tuning of the role actor."""

    def __init__(
        self,
        config: SFTConfig,
        session: Session,
        directory: RunDirectory,
        data: TextSets,
        phase: Callable[[str], None],
    ) -> None:
        super().__init__(
            config,
            session,
            directory,
            phase,
            Task(
                role="actor",
                train=data.train,
                held_out=data.held_out,
                rows_per_step=config.data.sequences_per_step,
                all_tokens=config.data.loss_on == "all",
            ),
        )
