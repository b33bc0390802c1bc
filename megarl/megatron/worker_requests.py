"""The requests of calls on Megatron workers.

The driver makes a request with ``Schedule``s for all ranks; ``part`` returns the request of a
replica's ranks, with ``RankSchedule``s and references to the chunks that they read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megarl.data.packing import TokenChunk
from megarl.experience.padded_batch import Columns, Selectable
from megarl.experience.records import StepContext
from megarl.types import RankSchedule, RolloutChunk, Schedule, TextChunk


@dataclass(frozen=True, kw_only=True)
class ForwardRequest[S: (Schedule, RankSchedule)]:
    """A forward pass; ``temperature`` is that of log-probabilities."""

    schedule: S
    chunks: Selectable[TokenChunk]
    temperature: float = 1.0

    def part(self: ForwardRequest[Schedule], replica: int) -> ForwardRequest[RankSchedule]:
        schedule = self.schedule.ranks[replica]
        chunks = self.chunks.only(schedule.chunks)
        return ForwardRequest(schedule=schedule, chunks=chunks, temperature=self.temperature)


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
class PretrainBatch[S: (Schedule, RankSchedule)]:
    """Texts of optimizer steps, with a schedule for each, with packs as long as the step's."""

    schedules: Sequence[S]
    chunks: Selectable[TextChunk]

    def part(self: PretrainBatch[Schedule], replica: int) -> PretrainBatch[RankSchedule]:
        schedules, chunks = _part(self.schedules, self.chunks, replica)
        return PretrainBatch(schedules=schedules, chunks=chunks)


@dataclass(frozen=True, kw_only=True)
class UpdateRequest[S: (Schedule, RankSchedule)]:
    """Optimizer steps of a role.

    Args:
        schedules: one per optimizer step.
        chunks: tokens, with the columns that the loss reads.
        kl_coef: coefficient of a penalty in the loss, per nat.
        texts: pretraining texts of the same optimizer steps, for the actor only.
    """

    schedules: Sequence[S]
    chunks: Selectable[TokenChunk]
    kl_coef: float = 0.0
    texts: PretrainBatch[S] | None = None

    def part(self: UpdateRequest[Schedule], replica: int) -> UpdateRequest[RankSchedule]:
        schedules, chunks = _part(self.schedules, self.chunks, replica)
        texts = None if self.texts is None else self.texts.part(replica)
        return UpdateRequest(schedules=schedules, chunks=chunks, kl_coef=self.kl_coef, texts=texts)


def _part[C: Selectable[Any]](
    schedules: Sequence[Schedule], chunks: C, replica: int
) -> tuple[tuple[RankSchedule, ...], C]:
    parts = tuple(schedule.ranks[replica] for schedule in schedules)
    needed: set[int] = set()
    for part in parts:
        needed.update(part.chunks)
    return parts, chunks.only(sorted(needed))
