"""The updates of a step: each role's schedules, epochs that may end early, and pretraining texts beside rollouts."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from megarl.algos.optimization import exceeds_target
from megarl.cluster.calls import Call
from megarl.cluster.ray_worker import ChunkRefs
from megarl.cluster.session import Session
from megarl.cluster.trainers import Role, Texts, reported
from megarl.config import PPOConfig
from megarl.data.batches import on_all_tokens, text_batch
from megarl.data.demonstrations import Demonstration
from megarl.data.schedule import inference_schedule, step_schedule, under_one_length, update_schedules
from megarl.data.stream import Stream, StreamState
from megarl.types import ExperienceChunk, RoleName, SampleInfo, Schedule


class StepPlan:
    """The schedules of one step.

    Args:
        config: of the run.
        samples: of the step.
        step: its number.
    """

    def __init__(self, config: PPOConfig, samples: Sequence[SampleInfo], step: int) -> None:
        self._config = config
        self._samples = samples
        self.step = step

    def inference(self, role: RoleName) -> Schedule:
        """A forward pass over all samples."""
        return inference_schedule(
            self._samples, self._config.layout(role), self._config.role(role).tokens_per_micro_batch
        )

    def passes(self, role: RoleName) -> list[tuple[Schedule, ...]]:
        """The optimizer steps, epoch by epoch where the epochs may end early, else together.

        Actor and critic take the same samples in each.
        """
        algo = self._config.algo
        steps = update_schedules(
            self._samples,
            self._config.layout(role),
            self._config.role(role).tokens_per_micro_batch,
            mini_batches=algo.mini_batches,
            epochs=algo.ppo_epochs,
            seed=self._config.run.seed,
            step=self.step,
        )
        size = len(steps) if algo.early_stop is None else algo.mini_batches
        return [steps[start : start + size] for start in range(0, len(steps), size)]


class TextMixture:
    """An endless stream of texts, some of which every optimizer step of the actor takes along.

    Args:
        config: of the run; it has ``ptx``.
        rows: the texts.
        session: where everything runs.
    """

    def __init__(self, config: PPOConfig, rows: Sequence[Demonstration], session: Session) -> None:
        assert config.ptx is not None
        self._settings, self._session = config.ptx, session
        self._layout, self._budget = config.layout("actor"), config.role("actor").tokens_per_micro_batch
        self._rows = Stream(rows, config.run.seed)

    def next(self, steps: Sequence[Schedule]) -> tuple[tuple[Schedule, ...], Texts]:
        """The next texts.

        Args:
            steps: the actor's optimizer steps that take them along.

        Returns:
            The same steps, each with packs as long as those of its texts, and the texts.
        """
        each = self._settings.sequences_per_mini_batch
        samples, chunks = text_batch(self._rows.next(each * len(steps)), self._layout.dp * len(steps))
        counted = on_all_tokens(samples) if self._settings.loss_on == "all" else samples
        lengthened: list[Schedule] = []
        along: list[Schedule] = []
        for index, own in enumerate(steps):
            texts = step_schedule(counted[index * each : (index + 1) * each], self._layout, self._budget)
            for schedules, schedule in zip((lengthened, along), under_one_length(own, texts), strict=True):
                schedules.append(schedule)
        return tuple(lengthened), Texts(schedules=along, chunks=self._session.share(chunks))

    def state(self) -> dict[str, Any]:
        """Where the stream stands."""
        return asdict(self._rows.state())

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from there."""
        self._rows.load(StreamState(**state))


class Updater:
    """Trains actor and critic, and lets the reference follow the actor.

    Args:
        config: of the run.
        roles: of the run.
        texts: what the actor learns beside the rollouts; None without any.
    """

    def __init__(self, config: PPOConfig, roles: Mapping[RoleName, Role], texts: TextMixture | None) -> None:
        self._config, self._texts = config, texts
        self._actor, self._critic = roles["actor"], roles.get("critic")

    def update(
        self,
        experience: ChunkRefs[ExperienceChunk],
        plan: StepPlan,
        *,
        kl_coef: float,
        learners: Container[RoleName],
    ) -> list[dict[str, float]]:
        """Takes the optimizer steps; while a critic warms up, it alone.

        A role that has nothing to learn forgoes its steps: Adam would move its weights without a gradient, too.

        Args:
            experience: of the step.
            plan: of the step.
            kl_coef: of a penalty in the loss, per nat.
            learners: the roles that have something to learn from the experience.

        Returns:
            What both roles tell of each optimizer step.
        """
        algo, trained = self._config.algo, self._trained(plan, learners)
        passes = list(zip(*(plan.passes(role.name) for role in trained), strict=True))
        told: list[dict[str, float]] = []
        for taken, of_roles in enumerate(passes, start=1):
            calls = [
                self._submit(role, schedules, experience, kl_coef)
                for role, schedules in zip(trained, of_roles, strict=True)
            ]
            steps = [dict(ChainMap(*of_step)) for of_step in zip(*map(reported, calls), strict=True)]
            told += steps
            stop = algo.early_stop if self._actor in trained else None
            if stop is not None and exceeds_target(moved(steps, of_roles[0]), target=stop.kl, factor=stop.factor):
                left = sum(len(schedules) for schedules, *_ in passes[taken:])
                for role in trained:
                    role.forgo(left)
                break
        sync = algo.kl.reference_sync
        if sync is not None and plan.step % sync.every == 0:
            self._actor.sync_reference()
        return told

    def state(self) -> dict[str, Any]:
        """Where the texts stand, as JSON."""
        return {} if self._texts is None else self._texts.state()

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from there."""
        if self._texts is not None:
            self._texts.load(state)

    def _trained(self, plan: StepPlan, learners: Container[RoleName]) -> list[Role]:
        """The roles that take optimizer steps; those that are due and have nothing to learn forgo theirs."""
        critic = self._config.critic
        warming = critic is not None and plan.step <= critic.warmup_steps
        trained: list[Role] = []
        for role in (self._actor, self._critic):
            if role is None or (warming and role is self._actor):
                continue
            if role.name in learners or (role is self._actor and self._texts is not None):
                trained.append(role)
            else:
                role.forgo(sum(map(len, plan.passes(role.name))))
        return trained

    def _submit(
        self, role: Role, schedules: Sequence[Schedule], experience: ChunkRefs[ExperienceChunk], kl_coef: float
    ) -> Call:
        """A role takes some optimizer steps; returns at once."""
        if role is not self._actor or self._texts is None:
            return role.update(schedules, experience, kl_coef=kl_coef)
        lengthened, texts = self._texts.next(schedules)
        return role.update(lengthened, experience, kl_coef=kl_coef, texts=texts)


def moved(steps: Sequence[Mapping[str, float]], schedules: Sequence[Schedule]) -> float:
    """The mean of log p(old) - log p(new) over the tokens of some optimizer steps, nats; 0 if none of them counts.

    Args:
        steps: what the actor told of each.
        schedules: of each.
    """
    name = "policy/ppo_kl"  # not told where no token counts
    known = [(step[name], schedule) for step, schedule in zip(steps, schedules, strict=True) if name in step]
    tokens = [schedule.ranks[0].total_response_tokens for _, schedule in known]
    return float(np.average([distance for distance, _ in known], weights=tokens)) if known else 0.0
