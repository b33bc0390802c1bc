"""What the stages have in common that learn from the actor's own responses: their parts, from start to close."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from megarl.cluster.resharder import Resharder
from megarl.cluster.session import Session
from megarl.config import PPOConfig, RAFTConfig
from megarl.config.schema import TruncateAt
from megarl.loop.assets import model_directory, template_directory
from megarl.loop.colocation import Turns
from megarl.loop.evaluate import training_evaluator
from megarl.loop.logprob_check import check_agreement, scored_probe
from megarl.loop.scoring import scorer_of
from megarl.loop.setup import launch_engines, launch_rules, launch_trainers, start_all
from megarl.models import model_spec
from megarl.preflight.datasets import PromptSets
from megarl.run.directory import RunDirectory, average_directory
from megarl.run.results import EvaluationResult, Metrics

C = TypeVar("C", bound=PPOConfig | RAFTConfig)


class Online(Generic[C]):
    """Trainers and engines of a run, and the actor's weights on their way from the ones to the others.

    Args:
        config: of the run.
        session: where everything runs.
        directory: of the run.
        data: the prompts, and the tokenizer.
        phase: is told what the run does.
        truncate_at: where scorers see a response end.
    """

    def __init__(
        self,
        config: C,
        session: Session,
        directory: RunDirectory,
        data: PromptSets,
        phase: Callable[[str], None],
        truncate_at: TruncateAt | None,
    ) -> None:
        self._config, self._tokenizer, self._phase = config, data.tokenizer, phase
        self._model_dir = model_directory(config, directory.path)
        self.trainers = launch_trainers(config, session)
        self._roles = self.trainers.roles
        self._engines = launch_engines(config, config.rollout, session, self._model_dir, weights="sync")
        spec = model_spec(config.model.hf_config())
        self._resharder = Resharder(session, config, self._roles["actor"], self._engines, spec)
        self._turns = Turns(self.trainers, self._engines, self._resharder, sleep=config.rollout.sleep)
        self._rules = launch_rules(config, session, self._model_dir)
        self._scorer = scorer_of(config, config.reward, self._roles, self._rules, self._engines, truncate_at)
        self._evaluator = training_evaluator(config, data, self._engines, self._scorer, self.trainers, self._turns)
        self.evaluate_every = None if config.evaluation is None else config.evaluation.every
        self._version = 0

    def start(self) -> None:
        """Starts every process, loads every model, and connects the actor with the engines, still without weights."""
        start_all(self.trainers, self._engines, self._rules, self._model_dir, sleep=self._config.rollout.sleep)
        self._resharder.connect().wait()

    def begin(self, step: int) -> Metrics:
        """Brings the actor's weights into the engines, and looks whether both compute the same, each in its turn."""
        gate = self._config.resharding.gate
        scored = None if gate is None else scored_probe(self._config, self._roles["actor"])
        transfer = self._to_engines(step)
        agreement = {} if scored is None else check_agreement(scored, self._engines).metrics()
        return {**transfer, **agreement}

    def _sync(self, step: int) -> Metrics:
        """Brings the actor's weights into the engines where that is due."""
        due = step % self._config.rollout.sync_every == 0 or step == self._config.run.steps
        return self._to_engines(step) if due else {}

    def _to_engines(self, version: int) -> Metrics:
        """Brings the actor's weights into the engines."""
        self._version = version
        return self._turns.to_engines(version).metrics()

    def evaluate(self, step: int) -> EvaluationResult | None:
        """Answers and scores the held-out prompts, with the weights of the last sync."""
        if self._evaluator is None:
            return None
        self._phase("evaluation")
        return self._evaluator.evaluate(step, self._version)

    def make_room(self) -> None:
        """Lets engines sleep that share the devices."""
        self._turns.to_trainers()

    def finish(self, export: Path) -> Metrics:
        """Writes the actor, and beside it the average of its weights where there is one."""
        self._phase("export")
        self.make_room()
        actor, template = self._roles["actor"], template_directory(self._config, self._model_dir)
        actor.export(export, template).wait()
        if self._config.actor.ema is not None:
            actor.use_average(True).wait()
            actor.export(average_directory(export), template).wait()
            actor.use_average(False).wait()
        return {}

    def close(self) -> None:
        """Lets every process end by itself."""
        ending = [self._engines.close()]
        if self._rules is not None:
            ending.append(self._rules.close())
        self.trainers.close()
        for call in ending:
            call.wait()
