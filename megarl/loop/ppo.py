"""Proximal policy optimization (Schulman et al., 2017) and its relatives, synchronous.

Every method of a role returns references at once: calls on one group run in the order of this file, calls on
different groups at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megarl.algos.kl import KLController
from megarl.algos.value_loss import ValueMoments
from megarl.cluster.calls import Call
from megarl.cluster.ray_worker import ChunkRefs
from megarl.cluster.session import Session
from megarl.cluster.trainers import reported
from megarl.config import PPOConfig
from megarl.experience.padded_batch import Columns
from megarl.loop.rollout_trainer import Online
from megarl.loop.sampler import DynamicSampling, Sampled, Sampler, sample_metrics
from megarl.loop.score_batch import Judged, judged, keeper
from megarl.loop.scoring import Sources, permutation_seed
from megarl.loop.update import StepPlan, TextMixture, Updater
from megarl.preflight.datasets import PromptSets
from megarl.run.directory import RunDirectory
from megarl.run.results import StepResult
from megarl.run.samples import shown_samples
from megarl.run.timers import Timers
from megarl.types import DenseScale, ExperienceChunk, ExperienceReport, ExperienceTerms


@dataclass(frozen=True, kw_only=True)
class Experience:
    """What came of a step's rollouts.

    Args:
        chunks: what updates read, by reference.
        sources: [N] scores by source, of the samples in their order.
        told: what the algorithm is told of the samples.
        metrics: of all of it.
    """

    chunks: ChunkRefs[ExperienceChunk]
    sources: Sources
    told: Judged
    metrics: Mapping[str, float]


class PPO(Online[PPOConfig]):
    """A run of PPO: rollouts, scores, experience, updates, and the weights back into the engines.

    Args:
        config: of the run.
        session: where everything runs.
        directory: of the run.
        data: the prompts, and the tokenizer.
        phase: is told what the run does.
    """

    def __init__(
        self,
        config: PPOConfig,
        session: Session,
        directory: RunDirectory,
        data: PromptSets,
        phase: Callable[[str], None],
    ) -> None:
        algo, reward = config.algo, config.reward
        super().__init__(config, session, directory, data, phase, algo.scores.truncate_at)
        self._sampler = Sampler(
            config,
            data.train,
            self._engines,
            self._scorer,
            self._turns,
            self.trainers.chunks,
            dynamic=None
            if algo.filter is None
            else DynamicSampling(keep=keeper(reward, algo), rounds=algo.filter_rounds),
            greedy=algo.advantage.name == "remax",
        )
        texts = None if config.ptx is None else TextMixture(config, data.texts, session)
        self._updater = Updater(config, self._roles, texts)
        self._kl = KLController(algo.kl.coef, target=algo.kl.target, horizon=algo.kl.horizon)
        self._value_norm: Mapping[str, float] | None = None
        if config.critic is not None and config.critic.value_norm is not None:
            self._value_norm = asdict(ValueMoments())

    def step(self, step: int) -> StepResult:
        """One iteration: rollouts, an update, and where it is due version ``step`` in the engines."""
        config = self._config
        timers = Timers(self._phase)
        with timers("step"):
            with timers("sync"):
                self._turns.back_to_engines(self._version)  # after an evaluation or a checkpoint
            with timers("rollout"):
                sampled = self._sampler.next(step, self._version)
            rollouts = sampled.rollouts
            plan = StepPlan(config, rollouts.samples, step)
            with timers("experience"):
                experience = self._experience(sampled, plan)
            with timers("update"):
                updates = self._updater.update(
                    experience.chunks, plan, kl_coef=self._kl.coef, learners=experience.told.learners
                )
            with timers("sync"):
                transfer = self._sync(step)
        kl = {"sequence_sum": "objective/kl", "token_mean": "objective/kl_token_mean"}[config.algo.kl.unit]
        if kl in experience.metrics:  # there is a reference, and a response with a score
            self._kl.update(experience.metrics[kl], len(rollouts.samples))
        seconds = timers.take()
        tokens = sum(sample.tokens for sample in rollouts.samples)
        metrics = {
            "version": step,
            **experience.metrics,
            **sample_metrics(rollouts.samples, config.rollout.max_new_tokens),
            **sampled.metrics,
            "update/steps": len(updates),
            **transfer,
            **seconds,
            "perf/tokens_per_second": tokens / seconds["time/step"],
        }
        shown = shown_samples(
            rollouts, experience.told.scores, experience.sources, self._tokenizer, config.tracking.samples
        )
        return StepResult(step=step, metrics=metrics, updates=updates, samples=shown)

    def _experience(self, sampled: Sampled, plan: StepPlan) -> Experience:
        """The roles and the rules look at the rollouts, all at once; then the actor's ranks build what updates read."""
        config, algo, rollouts = self._config, self._config.algo, sampled.rollouts.chunks
        actor, critic, reference = self._roles["actor"], self._roles.get("critic"), self._roles.get("reference")
        temperature = config.rollout.temperature
        calls: dict[str, Call] = {}
        if algo.correction.old_logprobs == "recompute":
            calls["logprobs"] = actor.logprobs(plan.inference("actor"), rollouts, temperature=temperature)
        if reference is not None:
            calls["ref"] = reference.logprobs(plan.inference("reference"), rollouts, temperature=temperature)
        if critic is not None:
            calls["values"] = critic.values(plan.inference("critic"), rollouts)
        told, sources = judged(sampled, config.reward, algo, seed=permutation_seed(config.run.seed, plan.step))
        by_role = {name: call.chunks for name, call in calls.items()}
        columns = Columns(
            samples=told.facts(sampled.rollouts.samples),
            old_logprobs=by_role.get("logprobs"),
            ref_logprobs=by_role.get("ref"),
            values=by_role.get("values"),
            dense=sampled.scoring.dense,
        )
        terms = ExperienceTerms(
            kl_coef=self._kl.coef,
            version=plan.step - 1,
            groups=int(told.groups.max()) + 1,
            value_norm=self._value_norm,
            dense=self._dense,
        )
        building = actor.build_experience(plan.inference("actor"), rollouts, columns, terms)
        report: ExperienceReport = reported(building)
        self._value_norm = report.value_norm
        seconds = {"reward": sampled.scoring.seconds(), **{name: call.longest() for name, call in calls.items()}}
        return Experience(
            chunks=building.chunks,
            sources=sources,
            told=told,
            metrics={**report.metrics, **told.metrics, **{f"time/{name}": spent for name, spent in seconds.items()}},
        )

    @property
    def _dense(self) -> DenseScale | None:
        """What the reward model's scores after every token are worth."""
        reward = self._config.reward
        if reward.dense is None:
            return None
        gain, bias = reward.weight * self._scorer.scale.gain, reward.weight * self._scorer.scale.bias
        return DenseScale(gain=gain, bias=bias, differences=reward.dense == "differences")

    def state(self) -> dict[str, Any]:
        """Where the prompts, the texts, the penalty and the scale of the values stand."""
        return {
            "prompts": self._sampler.state(),
            "texts": self._updater.state(),
            "kl": self._kl.state(),
            "value_norm": self._value_norm,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from there."""
        self._sampler.load(state["prompts"])
        self._updater.load(state["texts"])
        self._kl.load(state["kl"])
        self._value_norm = state["value_norm"]
