"""The rollouts of a step, which stay in the object store."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megarl.cluster.calls import ChunkCall
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
        samples: list[SampleInfo] = []
        before = 0
        for part in parts:
            samples += [replace(sample, chunk=before + sample.chunk) for sample in part.samples]
            before += len(part.chunks)
        chunks = ChunkRefs[RolloutChunk].joined(part.chunks for part in parts)
        return cls(samples=tuple(samples), chunks=chunks)

    def parts(self, count: int) -> list[Rollouts]:
        """Returns the samples in at most `count` parts of adjacent chunks, which keep their numbers."""
        parts: list[Rollouts] = []
        for numbers in split(range(len(self.chunks)), count):
            samples = tuple(sample for sample in self.samples if sample.chunk in numbers)
            parts.append(Rollouts(samples=samples, chunks=self.chunks.only(numbers)))
        return parts

    def fetched(self) -> list[RolloutChunk]:
        """Fetches all chunks, which these rollouts do not keep."""
        chunks = self.chunks.only(range(len(self.chunks)))
        return [chunks[chunk] for chunk in range(len(chunks))]

    def truncated(self, ends: Mapping[int, ResponseEnds], chunks: ChunkRefs[RolloutChunk]) -> Rollouts:
        """Returns the samples with other ends of their responses, at the same chunks and rows.

        Args:
            ends: ends of the responses by chunk; `finished` is whether a response has
                the token that ends it.
        """
        samples: list[SampleInfo] = []
        for sample in self.samples:
            sampled, given, finished = (column[sample.row] for column in ends[sample.chunk])
            samples.append(replace(sample, response_tokens=sampled, given_tokens=given, finished=bool(finished)))
        return Rollouts(samples=tuple(samples), chunks=chunks)


GenerateCall = ChunkCall[list[SampleInfo], RolloutChunk]
"""A call that has generated an item."""


@dataclass(frozen=True, kw_only=True)
class PendingRollouts:
    """Rollouts that are being generated; `answers` has the calls of the items, in the order of their chunks."""

    answers: Sequence[asyncio.Future[GenerateCall]]

    def parts(self, count: int) -> list[PendingRollouts]:
        """Returns what `Rollouts.parts` returns of the result; each part is finished with its own last response."""
        return [PendingRollouts(answers=answers) for answers in split(self.answers, count)]

    async def result(self) -> Rollouts:
        """Waits for the rollouts; the samples are in the order of the requests."""
        samples: list[SampleInfo] = []
        chunks: list[ChunkRefs[RolloutChunk]] = []
        for answer in self.answers:
            call = await answer
            samples += call.results[0]
            chunks.append(call.chunks)
        return Rollouts(samples=tuple(samples), chunks=ChunkRefs[RolloutChunk].of(chunks))

    async def longest(self) -> float:
        """Waits for the rollouts, and returns the seconds of the slowest call; 0 without any."""
        seconds = 0.0
        for answer in self.answers:
            call = await answer
            seconds = max(seconds, await call.longest())
        return seconds


def split[T](items: Sequence[T], count: int) -> list[Sequence[T]]:
    """Splits into at most `count` parts of adjacent items, with sizes that differ by at most 1."""
    count = min(count, len(items))
    parts: list[Sequence[T]] = []
    for part in range(count):
        parts.append(items[len(items) * part // count : len(items) * (part + 1) // count])
    return parts


def work_items(requests: Sequence[SampleRequest], chunks: int) -> list[WorkItem]:
    """Splits requests into at most `chunks` items."""
    items: list[WorkItem] = []
    for chunk, part in enumerate(split(requests, chunks)):
        items.append(WorkItem(chunk=chunk, requests=tuple(part)))
    return items
