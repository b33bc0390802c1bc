"""The rollouts of a step, which stay in the object store."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from megarl.cluster.calls import ChunkCall, gather_by_chunk
from megarl.cluster.ray_worker import ChunkRefs
from megarl.rollout.engine import Ends
from megarl.types import RolloutChunk, SampleInfo, SampleRequest, WorkItem

T = TypeVar("T")


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


@dataclass(frozen=True, kw_only=True)
class PendingTruncation:
    """Rollouts whose responses are being truncated."""

    rollouts: Rollouts
    call: ChunkCall[dict[int, Ends] | None, RolloutChunk]

    @property
    def finished(self) -> bool:
        return self.call.finished

    def result(self) -> Rollouts:
        """Waits for new chunks, with the samples at the same chunks and rows.

        `finished` is whether a response has the token.
        """
        ends = gather_by_chunk(self.call)  # lengths, and whether responses have the token
        samples: list[SampleInfo] = []
        for sample in self.rollouts.samples:
            sampled, given, finished = (column[sample.row] for column in ends[sample.chunk])
            samples.append(replace(sample, response_tokens=sampled, given_tokens=given, finished=bool(finished)))
        return Rollouts(samples=tuple(samples), chunks=self.call.chunks)


def split(items: Sequence[T], count: int) -> list[Sequence[T]]:
    """Splits into at most `count` parts of adjacent items, with sizes that differ by at most 1."""
    count = min(count, len(items))
    bounds = itertools.pairwise(len(items) * part // count for part in range(count + 1))
    return [items[start:stop] for start, stop in bounds]


def work_items(requests: Sequence[SampleRequest], chunks: int) -> list[WorkItem]:
    """Splits requests into at most `chunks` items."""
    parts = enumerate(split(requests, chunks))
    return [WorkItem(chunk=chunk, requests=tuple(part)) for chunk, part in parts]
