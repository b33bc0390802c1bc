"""Training on fixed rows: supervised fine-tuning, and what it shares with reward modelling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megarl.cluster.session import Session
from megarl.cluster.trainers import reported
from megarl.config import RewardModelConfig, SFTConfig
from megarl.data.batches import on_all_tokens, text_batch
from megarl.data.demonstrations import Demonstration
from megarl.data.preferences import Preference
from megarl.data.schedule import step_schedule
from megarl.data.stream import Stream, StreamState
from megarl.loop.assets import model_directory, template_directory
from megarl.loop.setup import launch_trainers
from megarl.preflight.datasets import TextSets
from megarl.run.directory import RunDirectory
from megarl.run.results import EvaluationResult, Metrics, StepResult
from megarl.run.timers import Timers
from megarl.types import RoleName


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is learned, and by whom.

    Args:
        role: that is trained.
        train: rows to learn from.
        held_out: rows to look at; None without any.
        per_step: rows that make a step.
        sequences_per_row: 1, or for preferences the responses of each.
        all_tokens: the loss is on the tokens of the prompts as well.
    """

    role: RoleName
    train: Sequence[Demonstration] | Sequence[Preference]
    held_out: Sequence[Demonstration] | Sequence[Preference] | None
    per_step: int
    sequences_per_row: int = 1
    all_tokens: bool = False


class Supervised:
    """One role, trained on rows of text.

    Args:
        config: of the run.
        session: where everything runs.
        directory: of the run.
        phase: is told what the run does.
        task: what is learned.
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
        self.trainers = launch_trainers(config, session)
        self._role = self.trainers.roles[task.role]
        self._layout, self._budget = config.layout(task.role), config.role(task.role).tokens_per_micro_batch
        self._task, self._rows = task, Stream(task.train, config.run.seed)
        self.evaluate_every = config.data.evaluate_every

    def start(self) -> None:
        """Starts the trainers and loads the model."""
        self.trainers.start(self._model_dir)

    def begin(self, step: int) -> Metrics:
        """Nothing is to be done."""
        del step
        return {}

    def step(self, step: int) -> StepResult:
        """One optimizer step."""
        timers = Timers()
        self._phase("update")
        with timers("step"):
            samples, chunks, schedule = self._batch(self._rows.next(self._task.per_step))
            updates = reported(self._role.update((schedule,), chunks))
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
        metrics = reported(self._role.evaluate(schedule, chunks))
        return EvaluationResult(step=step, metrics={"eval/samples": len(self._task.held_out), **metrics})

    def _batch(self, rows: Sequence[Any]) -> Any:
        samples, chunks = text_batch(rows, self._layout.dp)
        counted = on_all_tokens(samples) if self._task.all_tokens else samples
        schedule = step_schedule(counted, self._layout, self._budget, rows_per_unit=self._task.sequences_per_row)
        return samples, self._session.share(chunks), schedule

    def make_room(self) -> None:
        """Nothing is to be done: whoever trains has the devices all the time."""

    def state(self) -> dict[str, Any]:
        """Where the rows stand."""
        return {"rows": asdict(self._rows.state())}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from there."""
        self._rows.load(StreamState(**state["rows"]))

    def finish(self, export: Path) -> Metrics:
        """Writes the trained role."""
        self._phase("export")
        self._role.export(export, template_directory(self._config, self._model_dir)).wait()
        return {}

    def close(self) -> None:
        """Lets every process end by itself."""
        self.trainers.close()


class SFT(Supervised):
    """A run of supervised fine-tuning of the role actor.

    Args:
        config: of the run.
        session: where everything runs.
        directory: of the run.
        data: the demonstrations.
        phase: is told what the run does.
    """

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
                per_step=config.data.sequences_per_step,
                all_tokens=config.data.loss_on == "all",
            ),
        )
