"""The updates of a PPO step: schedules, optimizer steps of actor and critic, pretraining texts."""

from __future__ import annotations

import itertools
from collections import ChainMap
from collections.abc import Container, Mapping, Sequence

import numpy as np

from megarl.algos.optimization import exceeds_target
from megarl.cluster.calls import Call, rank0_result
from megarl.cluster.ray_worker import ChunkRefs
from megarl.config import RolloutTrainingConfig
from megarl.config.schema import PTX, Algo
from megarl.data.batches import on_all_tokens, text_batch
from megarl.data.schedule import step_schedule, under_one_length, update_schedules
from megarl.data.stream import Stream
from megarl.data.training_texts import TrainingText
from megarl.experience.records import ExperienceChunk
from megarl.groups.trainers import RemoteRole
from megarl.loop.pass_meter import PassMeter
from megarl.megatron.worker import MegatronWorker
from megarl.megatron.worker_requests import UpdateRequest
from megarl.types import RoleName, SampleInfo, Schedule, TextChunk, TokenValues


class PretrainMix:
    """Mixes pretraining texts into every optimizer step of the actor."""

    def __init__(self, config: RolloutTrainingConfig, settings: PTX, rows: Sequence[TrainingText]) -> None:
        self._settings = settings
        self._layout = config.layout("actor")
        self._budget = config.role("actor").tokens_per_micro_batch
        self.rows = Stream(rows, config.run.seed)

    def next(self, steps: Sequence[Schedule]) -> tuple[tuple[Schedule, ...], UpdateRequest[Schedule]]:
        """Takes the next texts for some optimizer steps; returns both, with one pack length per step."""
        per_step = self._settings.sequences_per_mini_batch
        samples, chunks = text_batch(self.rows.next(per_step * len(steps)), self._layout.dp * len(steps))
        trained = on_all_tokens(samples) if self._settings.loss_on == "all" else samples
        lengthened: list[Schedule] = []
        texts: list[Schedule] = []
        for index, step in enumerate(steps):
            rows = trained[index * per_step : (index + 1) * per_step]
            longer_step, text = under_one_length(step, step_schedule(rows, self._layout, self._budget))
            lengthened.append(longer_step)
            texts.append(text)
        return tuple(lengthened), UpdateRequest(schedules=texts, chunks=ChunkRefs[TextChunk].put(chunks))


class Updater:
    """Trains actor and critic, and moves the reference towards the actor.

    Args:
        warmup_steps: first steps of the run, in which the critic alone is trained.
        meter: counts the passes.
    """

    def __init__(
        self,
        config: RolloutTrainingConfig,
        algo: Algo,
        roles: Mapping[RoleName, RemoteRole],
        pretrain_mix: PretrainMix | None,
        meter: PassMeter,
        *,
        warmup_steps: int = 0,
    ) -> None:
        self._config = config
        self._algo = algo
        self._pretrain_mix = pretrain_mix
        self._meter = meter
        self._warmup_steps = warmup_steps
        self._actor = roles["actor"]
        self._critic = roles.get("critic")

    async def update(
        self,
        experience: ChunkRefs[ExperienceChunk],
        samples: Sequence[SampleInfo],
        step: int,
        *,
        kl_coef: float,
        trained_roles: Container[RoleName],
    ) -> list[dict[str, float]]:
        """Takes the optimizer steps of a step, and returns the metrics of each, of both roles.

        While the critic warms up, the actor takes none. A role without scored samples skips its
        steps, because Adam changes its weights even without a gradient.

        Args:
            samples: samples to train on.
            kl_coef: coefficient of a KL penalty in the loss, per nat.
            trained_roles: roles with scored samples.
        """
        trained = await self._trained(step, trained_roles)
        stop = self._algo.early_stop
        updates: list[dict[str, float]] = []
        for by_role in zip(*(self._passes(role.name, samples, step) for role in trained), strict=True):
            calls: list[Call[list[dict[str, float]] | None]] = []
            passes: list[list[Schedule]] = []
            for role, schedules in zip(trained, by_role, strict=True):
                texts = None
                counted = [*schedules]
                if role is self._actor and self._pretrain_mix is not None:
                    schedules, texts = self._pretrain_mix.next(schedules)
                    counted = [*schedules, *texts.schedules]
                request = UpdateRequest(schedules=schedules, chunks=experience, kl_coef=kl_coef, texts=texts)
                calls.append(role.dispatch(MegatronWorker.update, request))
                passes.append(counted)
            metrics = [await rank0_result(call) for call in calls]
            for role, schedules, call in zip(trained, passes, calls, strict=True):
                self._meter.add_update(role.name, schedules, await call.longest())
            reported = [dict(ChainMap(*reports)) for reports in zip(*metrics, strict=True)]
            updates += reported
            if stop is None or self._actor not in trained:
                continue
            if exceeds_target(mean_kl(reported, by_role[0]), target=stop.kl, factor=stop.factor):
                break
        left = self._steps - len(updates)
        if left:
            for call in [role.call(MegatronWorker.skip_steps, left) for role in trained]:
                await call
        sync = self._algo.kl.reference_sync
        if sync is not None and step % sync.every == 0:
            await self._actor.call(MegatronWorker.soft_update_reference)
        return updates

    async def take_token_values(self) -> TokenValues:
        """Pops the values of the tokens in the last update; none without `tracking.tokens`."""
        if not self._config.tracking.tokens:
            return {}
        values: TokenValues = {}
        for part in await self._actor.call(MegatronWorker.take_token_values):
            values |= part
        return values

    def state(self) -> dict[str, int]:
        """Returns the position in the pretraining texts."""
        return {} if self._pretrain_mix is None else self._pretrain_mix.rows.state()

    def load(self, state: Mapping[str, int]) -> None:
        """Loads `state()`."""
        if self._pretrain_mix is not None:
            self._pretrain_mix.rows.load(state)

    def trains_actor(self, step: int, trained_roles: Container[RoleName]) -> bool:
        """Returns whether the actor takes optimizer steps in a step; see `update`."""
        return not self._warms_up(step) and ("actor" in trained_roles or self._pretrain_mix is not None)

    def _warms_up(self, step: int) -> bool:
        return step <= self._warmup_steps

    @property
    def _steps(self) -> int:
        """Optimizer steps of the learning rate's schedule; a small selection leaves some out."""
        return self._algo.ppo_epochs * self._algo.mini_batches

    def _passes(self, role: RoleName, samples: Sequence[SampleInfo], step: int) -> list[tuple[Schedule, ...]]:
        """Returns the schedules of a role's optimizer steps; by epoch if training may stop early.

        An optimizer step has the same samples for every role.
        """
        mini_batches = min(self._algo.mini_batches, len({sample.conversation for sample in samples}))
        schedules = update_schedules(
            samples,
            self._config.layout(role),
            self._config.role(role).tokens_per_micro_batch,
            mini_batches=mini_batches,
            epochs=self._algo.ppo_epochs,
            seed=self._config.run.seed,
            step=step,
        )
        if self._algo.early_stop is None:
            return [schedules]
        return list(itertools.batched(schedules, mini_batches))

    async def _trained(self, step: int, trained_roles: Container[RoleName]) -> list[RemoteRole]:
        """Returns the roles that take optimizer steps; other roles with a schedule skip theirs."""
        trained: list[RemoteRole] = []
        if self.trains_actor(step, trained_roles):
            trained.append(self._actor)
        elif not self._warms_up(step):
            await self._actor.call(MegatronWorker.skip_steps, self._steps)
        if self._critic is not None and "critic" in trained_roles:
            trained.append(self._critic)
        elif self._critic is not None:
            await self._critic.call(MegatronWorker.skip_steps, self._steps)
        return trained


def mean_kl(updates: Sequence[Mapping[str, float]], schedules: Sequence[Schedule]) -> float:
    """Returns the mean of log p(old) - log p(new) over tokens, in nats; 0 without any."""
    name = "policy/ppo_kl"  # missing in a step in which no token has a weight
    known: list[float] = []
    tokens: list[int] = []
    for update, schedule in zip(updates, schedules, strict=True):
        if name in update:
            known.append(update[name])
            tokens.append(schedule.ranks[0].total_response_tokens)
    return float(np.average(known, weights=tokens)) if known else 0.0
