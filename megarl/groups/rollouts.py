"""The rollouts of a step, which stay in the object store."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from megarl.cluster.calls import Awaited, ChunkCall
from megarl.cluster.ray_worker import ChunkRefs
from megarl.rollout.completions import ResponseEnds
from megarl.types import RolloutChunk, SampleInfo, SampleRequest, WorkItem


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """The rollouts of a step: ids and lengths of the samples, and references to the chunks that hold them."""

    samples: tuple[SampleInfo, ...]
    chunks: ChunkRefs[RolloutChunk]

    @classmethod
    def joined(cls, parts: Sequence[Rollouts]) -> Rollouts:
        """Returns the rollouts of all parts, with consecutive numbers of their chunks."""
        before = itertools.accumulate((len(part.chunks) for part in parts), initial=0)
        return cls(
            samples=tuple(
                replace(sample, chunk=start + sample.chunk)
                for part, start in zip(parts, before, strict=False)
                for sample in part.samples
            ),
            chunks=ChunkRefs[RolloutChunk].joined(part.chunks for part in parts),
        )

    def parts(self, count: int) -> list[Rollouts]:
        """Returns the samples in at most `count` parts of adjacent chunks, which keep their numbers."""
        return [
            Rollouts(
                samples=tuple(sample for sample in self.samples if sample.chunk in own), chunks=self.chunks.only(own)
            )
            for own in split(range(len(self.chunks)), count)
        ]


class Requiring(Protocol):
    """The engines, as `RolloutGroup` is them."""

    def require(self, awaited: Awaited) -> None: ...


@dataclass(eq=False, kw_only=True)
class PendingRollouts:
    """Rollouts that are being generated."""

    items: Sequence[WorkItem]
    engines: Requiring
    answers: dict[int, ChunkCall[list[SampleInfo], RolloutChunk]] = field(default_factory=dict)  # by chunk

    @property
    def finished(self) -> bool:
        return all(item.chunk in self.answers for item in self.items)

    def parts(self, count: int) -> list[PendingRollouts]:
        """Returns what `Rollouts.parts` returns of the result; each part is finished with its own last response."""
        return [replace(self, items=items) for items in split(self.items, count)]

    def result(self) -> Rollouts:
        """Returns the finished rollouts; the samples are in the order of the requests."""
        calls = [self.answers[item.chunk] for item in self.items]
        return Rollouts(
            samples=tuple(info for call in calls for info in call.results[0]),
            chunks=ChunkRefs[RolloutChunk].of(call.chunks for call in calls),
        )

    def wait(self) -> Rollouts:
        """Waits for the rollouts; raises WorkerError as `Call.wait` does, and if no engine is left."""
        self.engines.require(self)
        return self.result()


@dataclass(frozen=True, kw_only=True)
class PendingPick:
    """Samples that are being copied into new chunks, which the calls make."""

    samples: tuple[SampleInfo, ...]
    calls: Sequence[ChunkCall[None, RolloutChunk]]

    @property
    def finished(self) -> bool:
        return all(call.finished for call in self.calls)

    def result(self) -> Rollouts:
        """Returns the copies."""
        return Rollouts(samples=self.samples, chunks=ChunkRefs[RolloutChunk].of(call.chunks for call in self.calls))


@dataclass(frozen=True, kw_only=True)
class PendingTruncation:
    """Rollouts whose responses are being truncated, into new chunks, which the calls make."""

    rollouts: Rollouts
    calls: Sequence[ChunkCall[dict[int, ResponseEnds], RolloutChunk]]

    @property
    def finished(self) -> bool:
        return all(call.finished for call in self.calls)

    def result(self) -> Rollouts:
        """Returns the truncated samples, at the same chunks and rows.

        `finished` is whether a response has the token.
        """
        ends = {chunk: own for call in self.calls for chunk, own in call.results[0].items()}
        samples: list[SampleInfo] = []
        for sample in self.rollouts.samples:  # lengths, and whether responses have the token
            sampled, given, finished = (column[sample.row] for column in ends[sample.chunk])
            samples.append(replace(sample, response_tokens=sampled, given_tokens=given, finished=bool(finished)))
        return Rollouts(samples=tuple(samples), chunks=ChunkRefs[RolloutChunk].of(call.chunks for call in self.calls))


def split[T](items: Sequence[T], count: int) -> list[Sequence[T]]:
    """Splits into at most `count` parts of adjacent items, with sizes that differ by at most 1."""
    count = min(count, len(items))
    bounds = itertools.pairwise(len(items) * part // count for part in range(count + 1))
    return [items[start:stop] for start, stop in bounds]


def work_items(requests: Sequence[SampleRequest], chunks: int) -> list[WorkItem]:
    """Splits requests into at most `chunks` items."""
    parts = enumerate(split(requests, chunks))
    return [WorkItem(chunk=chunk, requests=tuple(part)) for chunk, part in parts]
