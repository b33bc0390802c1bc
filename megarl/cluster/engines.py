"""The rollout engines of a run, and the rollouts that they return by reference."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Generic, Literal, TypeVar

from megarl.cluster.calls import gather_by_chunk
from megarl.cluster.ray_worker import ChunkRefs
from megarl.cluster.session import Session
from megarl.cluster.workers import WorkerGroup
from megarl.config import RunConfig, parse_devices
from megarl.config.schema import Rollout
from megarl.models import model_spec, vocab_size
from megarl.rollout.engine import PickRequest, RolloutEngine, TruncateRequest
from megarl.rollout.replay import RecordingEngine, ReplayingEngine
from megarl.types import RolloutChunk, SampleInfo, SampleRequest, WorkItem

Item = TypeVar("Item")
T = TypeVar("T")
_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class SharedQueue(Generic[Item]):
    """Items that several processes take in order, each once; iterating takes the next one.

    Processes count with `key` in the driver's store at `host` and `port`, and never wait for each other.
    """

    host: str
    port: int
    key: str
    items: ChunkRefs[Item]

    def __iter__(self) -> Iterator[Item]:
        # Not imported above: engines set their environment up before they import torch.
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  (public by documentation)

        store = TCPStore(self.host, self.port, is_master=False, timeout=_TIMEOUT)
        while (index := store.add(self.key, 1) - 1) < len(self.items):
            yield self.items[index]


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


class RolloutGroup(WorkerGroup[RolloutEngine]):
    """vLLM engines, each on `rollout.tp` devices.

    Args:
        model_dir: Hugging Face directory of the model.
        vocab_size: upper bound of the sampled token ids.
        tokenizer: Hugging Face directory of the tokenizer; needed for stop strings only.
        weights: `sync` starts without weights, `files` with those in `model_dir`.
    """

    def __init__(
        self,
        session: Session,
        rollout: Rollout,
        model_dir: str,
        *,
        vocab_size: int,
        device: str,
        tokenizer: str | None = None,
        weights: Literal["sync", "files"] = "sync",
        engine: type[RolloutEngine] = RolloutEngine,
    ) -> None:
        from megarl.resharding import serve_store  # imports torch

        devices = parse_devices(rollout.devices)
        processes = [
            session.launch(
                f"rollout engine {index}",
                devices[index * rollout.tp : (index + 1) * rollout.tp],
                engine,
                model_dir,
                rollout,
                engine_id=index,
                vocab_size=vocab_size,
                device=device,
                tokenizer=tokenizer,
                weights=weights,
            )
            for index in range(rollout.engines)
        ]
        super().__init__(session, "rollout", processes)
        self._store, self._queues = serve_store(session.host), itertools.count()

    def generate(self, requests: Sequence[SampleRequest], chunks: int) -> Rollouts:
        """Generates a response per request, and waits; responses do not depend on the engine.

        Args:
            requests: adjacent ones go to one engine, so that the samples of a prompt share its prefix.
            chunks: maximum number of chunks; an engine takes the next one when it has finished one.
        """
        parts = _split(requests, chunks)
        items = ChunkRefs[WorkItem].put(WorkItem(chunk=i, requests=tuple(part)) for i, part in enumerate(parts))
        queue = SharedQueue(self._session.host, self._store.port, f"queue {next(self._queues)}", items)
        call = self.stream(RolloutEngine.generate, queue, math.ceil(len(items) / len(self.processes)))
        done = {infos[0].chunk: (infos, chunk) for of_engine in call.wait() for infos, chunk in of_engine}
        return Rollouts(
            samples=tuple(info for index in range(len(items)) for info in done[index][0]),
            chunks=ChunkRefs({index: chunk for index, (_, chunk) in sorted(done.items())}),
        )

    def pick(self, rollouts: Rollouts, samples: Sequence[SampleInfo], chunks: int) -> Rollouts:
        """Copies some of the samples, in the given order, into at most `chunks` new chunks; the engines do it."""
        parts = dict(enumerate(_split(samples, chunks)))
        rows = {new: [(sample.chunk, sample.row) for sample in part] for new, part in parts.items()}
        own_chunks = self._deal(list(parts))
        requests = [
            PickRequest(
                chunks=rollouts.chunks.only({chunk for new in own for chunk, _ in rows[new]}),
                rows={new: rows[new] for new in own},
            )
            for own in own_chunks
        ]
        call = self.call_by_chunk(RolloutEngine.pick, requests, own_chunks)
        picked = (replace(sample, chunk=new, row=row) for new, part in parts.items() for row, sample in enumerate(part))
        return Rollouts(samples=tuple(picked), chunks=call.chunks)

    def truncate(self, rollouts: Rollouts, token: int, after: int) -> Rollouts:
        """Ends every response after its first `token` at an index of at least `after`.

        Returns:
            New chunks with the samples at the same chunks and rows; `finished` is whether a response has the token.
        """
        own_chunks = self._deal(sorted({sample.chunk for sample in rollouts.samples}))
        requests = [
            TruncateRequest(chunks=rollouts.chunks.only(own), token=token, after=after, own=own) for own in own_chunks
        ]
        call = self.call_by_chunk(RolloutEngine.truncate, requests, own_chunks)
        ends = gather_by_chunk(call)  # lengths, and whether responses have the token
        samples: list[SampleInfo] = []
        for sample in rollouts.samples:
            lengths, finished = ends[sample.chunk]
            samples.append(replace(sample, response_tokens=lengths[sample.row], finished=finished[sample.row]))
        return Rollouts(samples=tuple(samples), chunks=call.chunks)

    def _deal(self, chunks: Sequence[int]) -> list[Sequence[int]]:
        """Returns the chunks of each engine."""
        return [chunks[engine :: len(self.processes)] for engine in range(len(self.processes))]


def launch_engines(
    config: RunConfig, rollout: Rollout, session: Session, model_dir: str, *, weights: Literal["sync", "files"]
) -> RolloutGroup:
    """Launches the engines, and returns at once; see `RolloutGroup`."""
    engine = RolloutEngine
    if rollout.record is not None:
        engine = RecordingEngine
    elif rollout.replay is not None:
        engine = ReplayingEngine
    return RolloutGroup(
        session,
        rollout,
        model_dir,
        vocab_size=vocab_size(config, model_spec(config.model.hf_config())),
        device=config.cluster.device,
        tokenizer=config.model.tokenizer_directory(model_dir) if rollout.stop else None,
        weights=weights,
        engine=engine,
    )


def _split(items: Sequence[T], count: int) -> list[Sequence[T]]:
    """Splits into at most `count` parts of adjacent items, with sizes that differ by at most 1."""
    count = min(count, len(items))
    bounds = itertools.pairwise(len(items) * part // count for part in range(count + 1))
    return [items[start:stop] for start, stop in bounds]
