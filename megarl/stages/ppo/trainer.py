"""Proximal policy optimization (Schulman et al., 2017) and its relatives.

Calls of roles return at once. Calls on one group run in the order of this file, calls on different
groups in parallel.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from megarl.algos.kl import KLController
from megarl.algos.value_loss import ValueMoments
from megarl.cluster.calls import rank0_result
from megarl.cluster.ray_worker import ChunkRefs
from megarl.cluster.session import Session
from megarl.data.branches import Branches
from megarl.data.prompt_curriculum import curriculum_of
from megarl.data.schedule import inference_schedule
from megarl.experience.padded_batch import Columns
from megarl.experience.records import ExperienceChunk, StepContext
from megarl.loop.forward_passes import ROLES, Forward, ForwardPasses
from megarl.loop.rollout_buffer import RolloutBuffer
from megarl.loop.rollout_trainer import RolloutTrainer
from megarl.loop.sampler import Sampled, Sampler
from megarl.loop.scoring import (
    ENVIRONMENT,
    ScoredBatch,
    sample_filter,
    score_batch,
    scores_by_prompt,
    shuffled_order,
    total_scores,
    with_selection,
    without_scores,
)
from megarl.loop.update import PretrainMix, Updater
from megarl.megatron.worker import MegatronWorker
from megarl.megatron.worker_requests import ExperienceRequest
from megarl.preflight.datasets import Sets
from megarl.run.results import StepResult, TokenColumns
from megarl.run.sinks import Metrics
from megarl.run.timers import Timers
from megarl.stages.ppo.config import PPOConfig
from megarl.types import Ragged, TokenValues


class PPOTrainer(RolloutTrainer[PPOConfig]):
    """A step samples, scores, builds the experience, updates actor and critic, and syncs the weights."""

    def __init__(
        self, config: PPOConfig, session: Session, model_dir: str, data: Sets, phase: Callable[[str], None]
    ) -> None:
        algo = config.algo
        super().__init__(config, session, model_dir, data, phase, algo.scores.truncate_at)
        teachers: dict[str, str] = {}
        column = config.teacher_column
        if column is not None:
            for prompt in data.rows["data.prompts"]:
                teachers[prompt.prompt_id] = prompt.fields[column]
        self._forward_passes = ForwardPasses(config, algo, self.roles, teachers)
        keep = None
        begin_forwards = self._forward_passes.begin
        if algo.filter is not None:
            keep = sample_filter(self._weights, algo)
            begin_forwards = None
        sampler = Sampler(
            config,
            data.rows["data.prompts"],
            self._parts,
            self._trainers.chunks(config.rollout.inference_parts),
            keep=keep,
            max_rounds=algo.filter_rounds,
            greedy=algo.advantage.name == "remax",
            begin_forwards=begin_forwards,
            curriculum=curriculum_of(config, data.rows["data.prompts"]),
        )
        self._buffer = RolloutBuffer(config, sampler, self._engines, self._colocation)
        pretrain_mix = None if config.ptx is None else PretrainMix(config, config.ptx, data.rows["ptx.data"])
        self._updater = Updater(
            config, algo, self.roles, pretrain_mix, self._meter, warmup_steps=config.critic_warmup_steps
        )
        self._kl = KLController(algo.kl.coef, target=algo.kl.target, horizon=algo.kl.horizon)
        self._value_norm: Mapping[str, float] | None = None
        if config.critic is not None and config.critic.value_norm is not None:
            self._value_norm = asdict(ValueMoments())

    async def step(self, step: int) -> StepResult:
        """Takes a step; afterwards the engines have version `step` where a sync is due."""
        timers = Timers(self._phase)
        algo = self._config.algo
        with timers("step"):
            with timers("rollout"):
                sampled = await self._buffer.take(step)
            with timers("experience"):
                forwards = self._forward_passes.complete(sampled.rollouts, sampled.forwards)
                batch = await self._score(sampled, step)
                if algo.old_logprobs_from_update and not self._updater.trains_actor(step, batch.trained_roles):
                    passes = [self._forward_passes.actor_logprobs(sampled.rollouts)]  # for the metrics alone
                    forwards = {**forwards, "logprobs": passes}
                experience, metrics = await self._build_experience(sampled, step, forwards, batch)
            with timers("update"):
                trained = [sampled.rollouts.samples[index] for index in batch.selected]
                updates = await self._updater.update(
                    experience, trained, step, kl_coef=self._kl.coef, trained_roles=batch.trained_roles
                )
                in_update = await self._updater.take_token_values()
            with timers("sync"):
                transfer = await self._sync(step)
        self._adapt_kl_coef([metrics, *updates], len(sampled.rollouts.samples))
        timings = {**transfer, **timers.take()}
        columns = token_columns(experience, forwards, in_update)
        return await self._result(step, sampled, batch, updates, metrics, timings, columns)

    async def _score(self, sampled: Sampled, step: int) -> ScoredBatch:
        """Waits for the scores, computes group advantages, and selects the samples to train on."""
        samples = sampled.rollouts.samples
        algo = self._config.algo
        scored = await sampled.scoring
        order = None
        if self._config.reward.shuffle:
            order = shuffled_order(len(Branches.of(samples).last), self._config.run.seed, step)
        greedy = None if sampled.greedy is None else await sampled.greedy
        batch = score_batch(samples, scored, greedy, self._weights, algo, order=order)
        if self._config.data.curriculum.name != "uniform":
            scores = sampled.scores
            if scores is None:
                whole = Branches.of(samples).whole(scored.samples)
                scores = scores_by_prompt(whole, total_scores(scored.scores, whole, self._weights, algo.scores))
            self._buffer.note(step, scores)
        if not self._config.has_scores:
            return without_scores(batch)
        if algo.select is None:
            return batch
        return with_selection(batch, scored.samples, algo.select, self._config.data.samples_per_prompt)

    async def _build_experience(
        self, sampled: Sampled, step: int, forwards: Mapping[str, Sequence[Forward]], batch: ScoredBatch
    ) -> tuple[ChunkRefs[ExperienceChunk], Metrics]:
        """Builds the experience on the actor's ranks; returns it with the metrics of the whole phase."""
        scored = await sampled.scoring
        by_role = _by_role(forwards)
        samples = sampled.rollouts.samples
        actor = self.roles["actor"]
        columns = Columns(
            samples=batch.samples,
            old_logprobs=by_role.get("logprobs"),
            ref_logprobs=by_role.get("ref"),
            values=by_role.get("values"),
            dense=scored.dense,
        )
        turn_rewards = None
        if self._config.algo.from_token_rewards:
            turn_rewards = self._weights.get(ENVIRONMENT)
        context = StepContext(
            kl_coef=self._kl.coef,
            version=step - 1,
            max_staleness=self._config.rollout.max_staleness,
            groups=int(batch.samples.groups.max()) + 1,
            records_kept=self._config.recorded_kept_max is not None,
            value_norm=self._value_norm,
            turn_rewards=turn_rewards,
            dense=self._parts.scorer.token_scale,
        )
        schedule = inference_schedule(samples, actor.layout, self._config.role("actor").tokens_per_micro_batch)
        request = ExperienceRequest(
            schedule=schedule, rollouts=sampled.rollouts.chunks, columns=columns, context=context
        )
        call = actor.dispatch_by_chunk(MegatronWorker.build_experience, request)
        call.after = tuple(itertools.chain(*forwards.values()))
        report = await rank0_result(call)
        self._value_norm = report.value_norm
        timings = {"time/reward": scored.seconds}
        for name, parts in forwards.items():
            seconds = 0.0
            for part in parts:
                seconds += await part.longest()
            self._meter.add(name, ROLES[name], self._forward_passes.with_teachers(name, samples), seconds)
            timings[f"time/{name}"] = seconds
        found = dict(report.metrics)
        if not self._config.has_scores:
            for name in ("objective/score", "objective/rlhf_reward"):
                found.pop(name, None)
        return call.chunks, {**found, **batch.metrics, **timings}

    def _adapt_kl_coef(self, metrics: Sequence[Metrics], samples: int) -> None:
        name = {"sequence_sum": "objective/kl", "token_mean": "objective/kl_token_mean"}[self._config.algo.kl.unit]
        known = [found[name] for found in metrics if name in found]
        if known:  # in none without a reference, or without a scored response
            self._kl.update(sum(known) / len(known), samples)

    def state(self, directory: Path) -> dict[str, Any]:
        """Returns the driver's part of a checkpoint; writes the rollouts that wait for the training."""
        return {
            **super().state(directory),
            "texts": self._updater.state(),
            "kl": self._kl.state(),
            "value_norm": self._value_norm,
        }

    def load(self, state: Mapping[str, Any], directory: Path) -> None:
        """Loads `state()`."""
        super().load(state, directory)
        self._updater.load(state["texts"])
        self._kl.load(state["kl"])
        self._value_norm = state["value_norm"]


def _by_role(forwards: Mapping[str, Sequence[Forward]]) -> dict[str, ChunkRefs[Ragged]]:
    return {name: ChunkRefs[Ragged].of(part.chunks for part in parts) for name, parts in forwards.items()}


def token_columns(
    experience: ChunkRefs[ExperienceChunk], forwards: Mapping[str, Sequence[Forward]], in_update: TokenValues
) -> TokenColumns:
    """Per-token columns for samples.jsonl, fetched lazily."""
    by_role = _by_role(forwards)
    passes = {"logprobs": "old_logprobs", "ref": "ref_logprobs", "values": "old_values"}

    def columns(chunk: int) -> Mapping[str, Ragged]:
        built = experience[chunk]
        found = {passes[name]: column[chunk] for name, column in by_role.items()}
        for name in ("advantages", "weights", "actor_mask"):
            column: Ragged | None = getattr(built, name)
            if column is not None:
                found[name] = column
        rows = [in_update.get((chunk, row), {}) for row in range(len(built.response_ids))]
        for name in dict.fromkeys(itertools.chain(*rows)):
            found[name] = Ragged.from_rows([row.get(name, ()) for row in rows], np.float32)
        return found

    return columns
