"""The common part of trainers that learn from the actor's own responses."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from megarl.cluster.process_usage import memory_metrics
from megarl.cluster.session import Session
from megarl.config import RolloutTrainingConfig
from megarl.config.schema import TruncateAt
from megarl.config.schema.cluster_sections import shared_devices
from megarl.groups.colocation import Colocation
from megarl.groups.conversations import conversation_failures
from megarl.groups.engines import launch_engines
from megarl.groups.resharder import Resharder, SyncPlanner
from megarl.groups.trainers import close_all, launch_trainers, start_all
from megarl.loop.evaluate import Evaluator
from megarl.loop.logprob_check import begin_check
from megarl.loop.pass_meter import PassMeter
from megarl.loop.rollout_buffer import RolloutBuffer
from megarl.loop.sampler import RolloutParts, Sampled, sample_metrics
from megarl.loop.scoring import ScoredBatch, reward_weights
from megarl.loop.skipped_steps import SkippedBatches, write_rollouts
from megarl.loop.train import is_due
from megarl.megatron.worker import MegatronWorker
from megarl.preflight.datasets import Sets
from megarl.preflight.memory_plan import besides_cache
from megarl.run.paths import ema_export
from megarl.run.results import EvaluationResult, StepResult, TokenColumns, shown_samples
from megarl.run.sinks import Metrics


class RolloutTrainer[C: RolloutTrainingConfig]:
    """Launches trainers, engines and scorers, and syncs the engines; see `loop.train.Trainer`.

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
        data: Sets,
        phase: Callable[[str], None],
        truncate_at: TruncateAt | None,
    ) -> None:
        self._config = config
        self._model_dir = model_dir
        self._tokenizer = data.tokenizer
        self._phase = phase
        self._trainers = launch_trainers(config, session)
        self.roles = self._trainers.roles
        besides = besides_cache(config)
        self._engines = launch_engines(
            config, config.rollout, session, model_dir, weights="sync", besides_cache=besides
        )
        planner = SyncPlanner(session, config, self.roles["actor"])
        self._resharder = Resharder(planner, config.rollout, self.roles["actor"], self._engines)
        shared = bool(shared_devices(config.groups, config.rollout))
        self._colocation = Colocation(
            self._trainers, self._engines, self._resharder, sleep=config.rollout.sleep, shared=shared
        )
        self._parts = RolloutParts.launch(config, session, model_dir, self._trainers, self._colocation, truncate_at)
        self._weights = reward_weights(config.reward, config.environment)
        self._buffer: RolloutBuffer
        self._meter = PassMeter(config)
        self._skipped = SkippedBatches(config)
        self._evaluator: Evaluator | None = None
        self.evaluate_every: int | None = None
        if config.evaluation is not None:
            self._evaluator = Evaluator(config, data, self._parts, self._trainers.chunks())
            self.evaluate_every = config.evaluation.every

    async def start(self) -> None:
        """Starts every process, loads every model, and connects the actor with the engines."""
        sleep = self._config.rollout.sleep
        await start_all(self._trainers, self._engines, self._parts.services, self._model_dir, sleep=sleep)
        self._phase("connections")
        await self._resharder.connect()

    async def begin(self, step: int) -> Metrics:
        """Syncs the actor's weights to the engines, and compares their log-probabilities."""
        compare = None
        agreement = self._config.resharding.logprob_check
        if agreement is not None:
            compare = await begin_check(self._config, agreement, self.roles["actor"])
        self._phase("weights into the engines")
        report = await self._colocation.sync(step)
        metrics = report.metrics()
        if compare is not None:
            self._phase("log-probabilities compared")
            metrics |= await compare(self._engines)
        self._engines.take_metrics()  # the start is no part of a step
        self._buffer.begin(step)
        return metrics

    async def _sync(self, step: int) -> Metrics:
        """Moves the actor's weights into the engines as version `step`, if a sync is due."""
        evaluates = is_due(step, self.evaluate_every, self._config.steps)
        if not evaluates and (step % self._config.rollout.sync_every or self._buffer.skips_sync(step)):
            return {}
        await self._buffer.prepare_sync()
        report = await self._colocation.sync(step)
        self._buffer.synced(step)
        usage = await self._engines.take_usage()
        return {**report.metrics(), **memory_metrics(self._engines.name, usage)}

    async def _result(
        self,
        step: int,
        sampled: Sampled,
        batch: ScoredBatch,
        updates: Sequence[Metrics],
        metrics: Metrics,
        timings: Metrics,
        columns: TokenColumns,
    ) -> StepResult:
        """Returns the result of a step; `timings` include the sync's metrics."""
        rollouts = sampled.rollouts
        if self._config.rollout.replay is None:
            write = partial(write_rollouts, sampled, self._config.rollout, self._config.recorded_kept_max)
            self._skipped.add(step, updates, write)
        tokens = sum(sample.tokens for sample in rollouts.samples)
        all_metrics = {
            "version": step,
            **self._engines.take_metrics(),
            **metrics,
            **sample_metrics(rollouts.samples, self._config.rollout.max_new_tokens),
            **sampled.metrics,
            "update/steps": len(updates),
            **timings,
            "perf/tokens_per_second": tokens / timings["time/step"],
            **self._meter.take(await self._trainers.take_usage()),
        }
        if self._config.rollout.speculative:
            all_metrics |= await self._engines.take_drafts()
        if self._config.rollout.max_staleness:
            all_metrics["rollout/queue_depth"] = self._buffer.depth
        if self._config.rollout.max_replacements:
            all_metrics["rollout/engines_replaced"] = len(self._engines.replaced)
        prompts = {prompt.prompt_id: prompt for prompt in sampled.prompts}
        tracking = self._config.tracking
        shown = shown_samples(
            rollouts,
            prompts,
            batch.totals,
            batch.scores_by_reward,
            self._tokenizer,
            tracking.samples,
            batch.samples.sequence_advantages,
            columns if tracking.tokens else None,
        )
        rules = self._parts.scorer.rules
        failures = (*conversation_failures(rollouts.samples).values(), *(rules.failures if rules else ()))
        return StepResult(step=step, metrics=all_metrics, updates=updates, samples=shown, failures=failures)

    async def evaluate(self, step: int) -> EvaluationResult | None:
        """Evaluates the weights of the last sync, beside the training unless `evaluation.blocking`."""
        evaluation = self._config.evaluation
        if self._evaluator is None or evaluation is None:
            return None
        if not evaluation.blocking:
            self._buffer.run_beside(self._noting_versions(self._evaluator.measure(step)))
            return None
        self._phase("evaluation")
        return await self._evaluator.evaluate(step)

    async def evaluations(self, *, wait: bool) -> Sequence[EvaluationResult]:
        return await self._buffer.take_results(wait=wait)

    async def _noting_versions(self, evaluation: Coroutine[Any, Any, EvaluationResult]) -> EvaluationResult:
        """Adds the engines' versions before and after an evaluation to its metrics."""
        first = self._buffer.version
        result = await evaluation
        versions = {"eval/version": first, "eval/version_end": self._buffer.version}
        return replace(result, metrics={**result.metrics, **versions})

    async def to_training(self) -> None:
        await self._colocation.to_training()

    async def finish(self, export: Path) -> Metrics:
        """Exports the actor and its EMA."""
        self._phase("export")
        await self.to_training()
        actor = self.roles["actor"]
        tokenizer = self._config.model.tokenizer_directory(self._model_dir)
        await actor.call(MegatronWorker.export, str(export), tokenizer, self._model_dir)
        if self._config.actor.ema is not None:
            await actor.call(MegatronWorker.swap_weights, True)
            await actor.call(MegatronWorker.export, str(ema_export(export)), tokenizer, self._model_dir)
            await actor.call(MegatronWorker.swap_weights, False)
        return {}

    def state(self, directory: Path) -> dict[str, Any]:
        """Returns the driver's part of a checkpoint; writes the rollouts of sampled steps."""
        return {"prompts": self._buffer.state(directory)}

    def load(self, state: Mapping[str, Any], directory: Path) -> None:
        self._buffer.load(state["prompts"], directory)

    async def close(self) -> None:
        await close_all(self._trainers, self._engines, self._parts.services)
