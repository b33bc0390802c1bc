"""The common part of trainers that learn from the actor's own responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from megarl.cluster.engines import launch_engines
from megarl.cluster.resharder import Resharder
from megarl.cluster.scorers import launch_scorers
from megarl.cluster.session import Session
from megarl.cluster.trainers import close_all, launch_trainers, start_all
from megarl.config import PPOConfig, RAFTConfig
from megarl.config.schema import TruncateAt
from megarl.loop.colocation import Colocation
from megarl.loop.evaluate import Evaluator
from megarl.loop.logprob_check import LogprobCheck
from megarl.loop.sampler import Sampled, sample_metrics
from megarl.loop.scoring import Scorer, ScoresByReward, Values, shuffled_order
from megarl.megatron.worker import MegatronWorker
from megarl.preflight.datasets import PromptSets
from megarl.run.paths import ema_export
from megarl.run.results import EvaluationResult, StepResult, shown_samples
from megarl.run.sinks import Metrics

C = TypeVar("C", bound=PPOConfig | RAFTConfig)


class RolloutTrainer(Generic[C]):
    """Launches trainers, engines and scorers, and moves the actor's weights into the engines.

    Args:
        model_dir: Hugging Face directory of the model.
        phase: called with the name of each phase that begins.
        truncate_at: where the rewards' view of a response ends.
    """

    def __init__(
        self,
        config: C,
        session: Session,
        model_dir: str,
        data: PromptSets,
        phase: Callable[[str], None],
        truncate_at: TruncateAt | None,
    ) -> None:
        self._config, self._model_dir, self._tokenizer, self._phase = config, model_dir, data.tokenizer, phase
        self._trainers = launch_trainers(config, session)
        self.roles = self._trainers.roles
        self._engines = launch_engines(config, config.rollout, session, model_dir, weights="sync")
        self._resharder = Resharder(session, config, self.roles["actor"], self._engines)
        self._colocation = Colocation(self._trainers, self._engines, self._resharder, sleep=config.rollout.sleep)
        self._rules = launch_scorers(config, session, model_dir)
        self._scorer = Scorer(config, self.roles, self._rules, self._engines, truncate_at)
        self._evaluator: Evaluator | None = None
        self.evaluate_every: int | None = None
        if config.evaluation is not None:
            ema_of = self.roles["actor"] if config.evaluation.ema else None
            chunks = self._trainers.chunks
            self._evaluator = Evaluator(config, data, self._engines, self._scorer, self._colocation, chunks, ema_of)
            self.evaluate_every = config.evaluation.every

    def start(self) -> None:
        """Starts every process, loads every model, and connects the actor with the engines."""
        start_all(self._trainers, self._engines, self._rules, self._model_dir, sleep=self._config.rollout.sleep)
        self._resharder.connect().wait()

    def begin(self, step: int) -> Metrics:
        """Moves the actor's weights into the engines, and compares the log-probabilities of both."""
        gate = self._config.resharding.gate
        check = None if gate is None else LogprobCheck(self._config, self.roles["actor"])
        transfer = self._colocation.sync(step).metrics()
        return transfer if check is None else {**transfer, **check.compare(self._engines)}

    def _sync(self, step: int) -> Metrics:
        """Moves the actor's weights into the engines as version `step`, if a sync is due."""
        due = step % self._config.rollout.sync_every == 0 or step == self._config.run.steps
        return self._colocation.sync(step).metrics() if due else {}

    def _score_order(self, count: int, step: int) -> npt.NDArray[np.int64] | None:
        """Returns the permutation of a step's scores; None unless they are shuffled."""
        return shuffled_order(count, self._config.run.seed, step) if self._config.reward.shuffle else None

    def _result(
        self,
        step: int,
        sampled: Sampled,
        scores: Values,
        scores_by_reward: ScoresByReward,
        updates: Sequence[Metrics],
        metrics: Metrics,
        timings: Metrics,
    ) -> StepResult:
        """Returns the result of a step; `scores` are the totals, [N], and `timings` include the sync's metrics."""
        rollouts = sampled.rollouts
        tokens = sum(sample.tokens for sample in rollouts.samples)
        all_metrics = {
            "version": step,
            **metrics,
            **sample_metrics(rollouts.samples, self._config.rollout.max_new_tokens),
            **sampled.metrics,
            "update/steps": len(updates),
            **timings,
            "perf/tokens_per_second": tokens / timings["time/step"],
        }
        shown = shown_samples(rollouts, scores, scores_by_reward, self._tokenizer, self._config.tracking.samples)
        return StepResult(step=step, metrics=all_metrics, updates=updates, samples=shown)

    def evaluate(self, step: int) -> EvaluationResult | None:
        """Evaluates the weights of the last sync."""
        if self._evaluator is None:
            return None
        self._phase("evaluation")
        return self._evaluator.evaluate(step)

    def to_training(self) -> None:
        """Gives shared devices to the trainers."""
        self._colocation.to_training()

    def finish(self, export: Path) -> Metrics:
        """Exports the actor and its EMA."""
        self._phase("export")
        self.to_training()
        actor, template = self.roles["actor"], self._config.model.tokenizer_directory(self._model_dir)
        actor.call(MegatronWorker.export, str(export), template).wait()
        if self._config.actor.ema is not None:
            actor.call(MegatronWorker.swap_weights, True).wait()
            actor.call(MegatronWorker.export, str(ema_export(export)), template).wait()
            actor.call(MegatronWorker.swap_weights, False).wait()
        return {}

    def close(self) -> None:
        """Lets every process end by itself."""
        close_all(self._trainers, self._engines, self._rules)
