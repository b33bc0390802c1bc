"""Proximal policy optimization (Schulman et al., 2017) and its relatives, synchronous.

Calls of a role return at once: calls on one group run in the order of this file, calls on different groups at the same
time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megarl.algos.kl import KLController
from megarl.algos.value_loss import ValueMoments
from megarl.cluster.calls import ChunkCall, rank0_result
from megarl.cluster.ray_worker import ChunkRefs
from megarl.cluster.session import Session
from megarl.config import PPOConfig
from megarl.experience.padded_batch import Columns
from megarl.loop.rollout_trainer import RolloutTrainer
from megarl.loop.sampler import DynamicSampling, Sampled, Sampler
from megarl.loop.scoring import ScoredBatch, sample_filter, score_batch
from megarl.loop.update import PretrainMix, StepPlan, Updater
from megarl.megatron.worker import MegatronWorker
from megarl.megatron.worker_requests import ExperienceRequest, ForwardRequest
from megarl.preflight.datasets import PromptSets
from megarl.run.directory import RunDirectory
from megarl.run.results import StepResult
from megarl.run.sinks import Metrics
from megarl.run.timers import Timers
from megarl.types import ExperienceChunk, Ragged, StepContext


@dataclass(frozen=True, kw_only=True)
class Experience:
    """The experience of a step, by reference, with the scores that it was built of and the metrics of both."""

    chunks: ChunkRefs[ExperienceChunk]
    batch: ScoredBatch
    metrics: Metrics


class PPOTrainer(RolloutTrainer[PPOConfig]):
    """Steps of rollouts, scores, experience, updates, and a sync of the weights."""

    def __init__(
        self,
        config: PPOConfig,
        session: Session,
        directory: RunDirectory,
        data: PromptSets,
        phase: Callable[[str], None],
    ) -> None:
        algo = config.algo
        super().__init__(config, session, directory, data, phase, algo.scores.truncate_at)
        dynamic = None
        if algo.filter is not None:
            dynamic = DynamicSampling(keep=sample_filter(config.reward, algo), rounds=algo.filter_rounds)
        self._sampler = Sampler(
            config,
            data.train,
            self._engines,
            self._scorer,
            self._colocation,
            self._trainers.chunks,
            dynamic=dynamic,
            greedy=algo.advantage.name == "remax",
        )
        pretrain_mix = None if config.ptx is None else PretrainMix(config, data.texts, session)
        self._updater = Updater(config, self.roles, pretrain_mix)
        self._kl = KLController(algo.kl.coef, target=algo.kl.target, horizon=algo.kl.horizon)
        self._value_norm: Mapping[str, float] | None = None
        if config.critic is not None and config.critic.value_norm is not None:
            self._value_norm = asdict(ValueMoments())

    def step(self, step: int) -> StepResult:
        """Takes a step, after which the engines have version ``step`` where a sync is due."""
        timers = Timers(self._phase)
        with timers("step"):
            with timers("sync"):
                self._colocation.to_rollout()  # the trainers have the devices after an evaluation or a checkpoint
            with timers("rollout"):
                sampled = self._sampler.next(step)
            plan = StepPlan(self._config, sampled.rollouts.samples, step)
            with timers("experience"):
                experience = self._experience(sampled, plan)
            batch = experience.batch
            with timers("update"):
                updates = self._updater.update(
                    experience.chunks, plan, kl_coef=self._kl.coef, trained_roles=batch.trained_roles
                )
            with timers("sync"):
                transfer = self._sync(step)
        kl = {"sequence_sum": "objective/kl", "token_mean": "objective/kl_token_mean"}[self._config.algo.kl.unit]
        if kl in experience.metrics:  # there is a reference, and a response with a score
            self._kl.update(experience.metrics[kl], len(sampled.rollouts.samples))
        timings = {**transfer, **timers.take()}
        scores = batch.samples.scores
        return self._result(step, sampled, scores, batch.scores_by_reward, updates, experience.metrics, timings)

    def _experience(self, sampled: Sampled, plan: StepPlan) -> Experience:
        """The roles and the rewards look at the rollouts, all at once; then the actor's ranks build the experience."""
        config, algo, rollouts = self._config, self._config.algo, sampled.rollouts.chunks
        actor, critic, reference = self.roles["actor"], self.roles.get("critic"), self.roles.get("reference")
        temperature = config.rollout.temperature
        calls: dict[str, ChunkCall[None, Ragged]] = {}
        if algo.correction.old_logprobs == "recompute":
            request = ForwardRequest(schedule=plan.inference("actor"), chunks=rollouts, temperature=temperature)
            calls["logprobs"] = actor.dispatch_by_chunk(MegatronWorker.logprobs, request)
        if reference is not None:
            request = ForwardRequest(schedule=plan.inference("reference"), chunks=rollouts, temperature=temperature)
            calls["ref"] = reference.dispatch_by_chunk(MegatronWorker.logprobs, request)
        if critic is not None:
            request = ForwardRequest(schedule=plan.inference("critic"), chunks=rollouts)
            calls["values"] = critic.dispatch_by_chunk(MegatronWorker.values, request)
        samples = sampled.rollouts.samples
        order = self._score_order(len(samples), plan.step)
        batch = score_batch(samples, sampled.scoring, sampled.greedy, config.reward, algo, order=order)
        by_role = {name: call.chunks for name, call in calls.items()}
        columns = Columns(
            samples=batch.samples,
            old_logprobs=by_role.get("logprobs"),
            ref_logprobs=by_role.get("ref"),
            values=by_role.get("values"),
            dense=sampled.scoring.dense,
        )
        context = StepContext(
            kl_coef=self._kl.coef,
            version=plan.step - 1,
            groups=int(batch.samples.groups.max()) + 1,
            value_norm=self._value_norm,
            dense=self._scorer.token_scale,
        )
        schedule = plan.inference("actor")
        request = ExperienceRequest(schedule=schedule, rollouts=rollouts, columns=columns, context=context)
        building = actor.dispatch_by_chunk(MegatronWorker.build_experience, request)
        report = rank0_result(building)
        self._value_norm = report.value_norm
        seconds = {"reward": sampled.scoring.seconds(), **{name: call.longest() for name, call in calls.items()}}
        return Experience(
            chunks=building.chunks,
            batch=batch,
            metrics={**report.metrics, **batch.metrics, **{f"time/{name}": spent for name, spent in seconds.items()}},
        )

    def state(self) -> dict[str, Any]:
        """The positions in prompts and texts, the coefficient of the KL penalty and the value normaliser."""
        return {
            "prompts": self._sampler.state(),
            "texts": self._updater.state(),
            "kl": self._kl.state(),
            "value_norm": self._value_norm,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores ``state()``."""
        self._sampler.load(state["prompts"])
        self._updater.load(state["texts"])
        self._kl.load(state["kl"])
        self._value_norm = state["value_norm"]
