"""The requests of calls on Megatron workers.

The driver makes a request for all ranks, with ``Schedule``s; a rank gets the ``part`` of its replica, with its
``RankSchedule``s and references to the chunks that it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar, cast

from megarl.data.packing import TokenChunk
from megarl.experience.padded_batch import Columns, Selectable
from megarl.types import RankSchedule, RolloutChunk, Schedule, StepContext, TextChunk

S = TypeVar("S", Schedule, RankSchedule)


@dataclass(frozen=True, kw_only=True)
class ForwardRequest(Generic[S]):
    """A forward pass over samples.

    Args:
        chunks: with the tokens.
        temperature: of the sampling, for log-probabilities.
    """

    schedule: S
    chunks: Selectable[TokenChunk]
    temperature: float = 1.0

    def part(self: ForwardRequest[Schedule], replica: int) -> ForwardRequest[RankSchedule]:
        """What the ranks of a replica get."""
        own = self.schedule.ranks[replica]
        part = replace(self, schedule=own, chunks=self.chunks.only(own.chunks))
        return cast("ForwardRequest[RankSchedule]", part)


@dataclass(frozen=True, kw_only=True)
class ExperienceRequest(Generic[S]):
    """The experience of a step.

    Args:
        schedule: of the actor's inference.
        columns: what other roles and the driver say of the samples.
        terms: of the step.
    """

    schedule: S
    rollouts: Selectable[RolloutChunk]
    columns: Columns
    context: StepContext

    def part(self: ExperienceRequest[Schedule], replica: int) -> ExperienceRequest[RankSchedule]:
        """What the ranks of a replica get."""
        own = self.schedule.ranks[replica]
        part = replace(
            self, schedule=own, rollouts=self.rollouts.only(own.chunks), columns=self.columns.only(own.chunks)
        )
        return cast("ExperienceRequest[RankSchedule]", part)


@dataclass(frozen=True, kw_only=True)
class PretrainBatch(Generic[S]):
    """Texts that optimizer steps take along; their packs are as long as the steps' own.

    Args:
        schedules: one per optimizer step.
    """

    schedules: Sequence[S]
    chunks: Selectable[TextChunk]

    def part(self: PretrainBatch[Schedule], replica: int) -> PretrainBatch[RankSchedule]:
        """What the ranks of a replica get."""
        own = _own(self.schedules, replica)
        part = replace(self, schedules=own, chunks=self.chunks.only(_chunks(own)))
        return cast("PretrainBatch[RankSchedule]", part)


@dataclass(frozen=True, kw_only=True)
class UpdateRequest(Generic[S]):
    """Optimizer steps of a role.

    Args:
        schedules: one per optimizer step.
        chunks: with the columns that the stage's loss reads.
        kl_coef: of a penalty in the loss, per nat.
        texts: as ``ptx`` of the configuration says.
    """

    schedules: Sequence[S]
    chunks: Selectable[TokenChunk]
    kl_coef: float = 0.0
    texts: PretrainBatch[S] | None = None

    def part(self: UpdateRequest[Schedule], replica: int) -> UpdateRequest[RankSchedule]:
        """What the ranks of a replica get."""
        own = _own(self.schedules, replica)
        texts = None if self.texts is None else self.texts.part(replica)
        part = replace(self, schedules=own, chunks=self.chunks.only(_chunks(own)), texts=texts)
        return cast("UpdateRequest[RankSchedule]", part)


def _own(schedules: Sequence[Schedule], replica: int) -> tuple[RankSchedule, ...]:
    return tuple(schedule.ranks[replica] for schedule in schedules)


def _chunks(schedules: Sequence[RankSchedule]) -> list[int]:
    """The chunks that a rank reads in some passes, in order."""
    return sorted({chunk for schedule in schedules for chunk in schedule.chunks})
