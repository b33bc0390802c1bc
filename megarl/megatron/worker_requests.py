"""The requests of calls on Megatron workers.

The driver makes a request with ``Schedule``s for all ranks; ``part`` returns the request of a
replica's ranks, with ``RankSchedule``s and references to the chunks that they read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megarl.data.packing import TokenChunk
from megarl.experience.padded_batch import Columns, Selectable
from megarl.experience.records import StepContext
from megarl.types import RankSchedule, RolloutChunk, Schedule


@dataclass(frozen=True, kw_only=True)
class ForwardRequest[S: (Schedule, RankSchedule)]:
    """A forward pass.

    Args:
        temperature: that of log-probabilities.
        adapted: whether adapters take part, if there are some.
    """

    schedule: S
    chunks: Selectable[TokenChunk]
    temperature: float = 1.0
    adapted: bool = True

    def part(self: ForwardRequest[Schedule], replica: int) -> ForwardRequest[RankSchedule]:
        schedule = self.schedule.ranks[replica]
        chunks = self.chunks.only(schedule.chunks)
        return ForwardRequest(schedule=schedule, chunks=chunks, temperature=self.temperature, adapted=self.adapted)


@dataclass(frozen=True, kw_only=True)
class ExperienceRequest[S: (Schedule, RankSchedule)]:
    """The experience of a step; the schedule is that of the actor's inference."""

    schedule: S
    rollouts: Selectable[RolloutChunk]
    columns: Columns
    context: StepContext

    def part(self: ExperienceRequest[Schedule], replica: int) -> ExperienceRequest[RankSchedule]:
        schedule = self.schedule.ranks[replica]
        return ExperienceRequest(
            schedule=schedule,
            rollouts=self.rollouts.only(schedule.chunks),
            columns=self.columns.only(schedule.chunks),
            context=self.context,
        )


@dataclass(frozen=True, kw_only=True)
class UpdateRequest[S: (Schedule, RankSchedule)]:
    """Optimizer steps of a role, one per schedule.

    Args:
        chunks: tokens, with the columns that the loss reads.
        kl_coef: coefficient of a penalty in the loss, per nat.
        texts: pretraining texts of the same optimizer steps, with packs as long, for
            the actor only.
    """

    schedules: Sequence[S]
    chunks: Selectable[TokenChunk]
    kl_coef: float = 0.0
    texts: UpdateRequest[S] | None = None

    def part(self: UpdateRequest[Schedule], replica: int) -> UpdateRequest[RankSchedule]:
        schedules = tuple(schedule.ranks[replica] for schedule in self.schedules)
        needed: set[int] = set()
        for schedule in schedules:
            needed.update(schedule.chunks)
        return UpdateRequest(
            schedules=schedules,
            chunks=self.chunks.only(sorted(needed)),
            kl_coef=self.kl_coef,
            texts=self.texts and self.texts.part(replica),
        )
