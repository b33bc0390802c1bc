"""Proximal policy optimization (Schulman et al., 2017) with a critic, a reference and a reward model, synchronous.

Every method of a role returns references at once: calls on one group run in the order of this file, calls on
different groups at the same time.
"""

from __future__ import annotations

import time

from megarl.cluster.group import merged_scores, reported
from megarl.cluster.session import Session
from megarl.config import PPOConfig
from megarl.data.prompts import sample_requests
from megarl.data.streams import Stream
from megarl.loop.directory import RunDirectory
from megarl.loop.preflight import check
from megarl.loop.report import Reporter, StepResult, Summary
from megarl.loop.schedules import StepPlan
from megarl.loop.setup import Parts, assemble
from megarl.obs.timers import Timers


def train(config: PPOConfig) -> Summary:
    """Runs PPO and writes the run's directory; leaves no process, shared memory or temporary file.

    Raises:
        ConfigError: the model, the prompts or run.dir cannot be used.
        WorkerError: a process failed; the message names it and the cause.
    """
    start = time.perf_counter()
    prompts = Stream(check(config), config.run.seed)
    directory = RunDirectory(config)
    session = Session(config.cluster, directory.logs, config.cluster.address)
    with Reporter(config, directory) as reporter, session:
        parts = assemble(config, session, directory, prompts)
        parts.resharder.sync(version=0)
        reporter.started(time.perf_counter() - start)
        for step in range(1, config.run.steps + 1):
            reporter.write(take_step(config, parts, step))
        parts.close()
    return reporter.summary(time.perf_counter() - start)


def take_step(config: PPOConfig, parts: Parts, step: int) -> StepResult:
    """One iteration: rollouts under version ``step - 1``, an update, and version ``step`` in the engines."""
    timers = Timers()
    actor, critic, reward = parts.roles["actor"], parts.roles["critic"], parts.roles["reward"]
    reference = parts.roles.get("reference")
    with timers("step"):
        with timers("generate"):
            prompts = parts.prompts.next(config.data.prompts_per_step)
            requests = sample_requests(prompts, config.data.samples_per_prompt, seed=config.run.seed, step=step)
            rollouts = parts.rollout.generate(requests, parts.chunks)
        plan = StepPlan(config, rollouts.samples, step)
        with timers("evaluate"):
            scoring = reward.scores(plan.inference("reward"), rollouts.chunks)
            old = actor.logprobs(plan.inference("actor"), rollouts.chunks)
            ref = reference.logprobs(plan.inference("reference"), rollouts.chunks) if reference else None
            values = critic.values(plan.inference("critic"), rollouts.chunks)
            scores = merged_scores(scoring)
            building = actor.build_experience(plan.inference("actor"), rollouts.chunks, old, ref, values, scores)
            objective = reported(building)
        with timers("update"):
            actor_update = actor.update(plan.update("actor"), building.chunks)
            critic_update = critic.update(plan.update("critic"), building.chunks)
            actor_updates, critic_updates = reported(actor_update), reported(critic_update)
        with timers("sync"):
            transfer = parts.resharder.sync(version=step)
    return StepResult(
        step=step,
        samples=rollouts.samples,
        objective=objective,
        updates=tuple({**a, **c} for a, c in zip(actor_updates, critic_updates, strict=True)),
        transfer=transfer,
        seconds=timers.take(),
    )
