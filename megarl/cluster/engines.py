"""The engines of a run: they share the samples of a step and return them by reference."""

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
from megarl.models import model_spec
from megarl.remote import RemoteMethod
from megarl.rollout.engine import PickRequest, RolloutEngine, TruncateRequest
from megarl.rollout.replay import RecordingEngine, ReplayingEngine
from megarl.types import RolloutChunk, SampleInfo, SampleRequest, WorkItem

Item = TypeVar("Item")
T = TypeVar("T")
_TIMEOUT = timedelta(seconds=60)


class SharedQueue(Generic[Item]):
    """Items to take. Each goes to one process, in their order; iterating takes the next one each time.

    It is sent to the processes: an item is fetched by whoever takes it. Nobody waits: what a counter in the driver's
    store says is what comes next.

    Args:
        address: host and port of the store.
        key: of the counter.
        items: by their place in the order.
    """

    def __init__(self, address: tuple[str, int], key: str, items: ChunkRefs[Item]) -> None:
        self._address = address
        self._key = key
        self._items = items

    def __iter__(self) -> Iterator[Item]:
        # Here, because a process may have to set its environment up before it imports torch.
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  (public by documentation)

        host, port = self._address
        store = TCPStore(host, port, is_master=False, timeout=_TIMEOUT)
        while (index := store.add(self._key, 1) - 1) < len(self._items):
            yield self._items[index]


class QueueStore:
    """The store with the counters of queues, where the processes of the session can reach it.

    Args:
        session: of the run.
    """

    def __init__(self, session: Session) -> None:
        from megarl.resharding import serve_store

        self._session = session
        self._store = serve_store(session.host)
        self._queues = itertools.count()

    def queue(self, items: Sequence[Item]) -> SharedQueue[Item]:
        """A queue of items; they exist as long as the queue does."""
        key = f"queue {next(self._queues)}"
        return SharedQueue((self._session.host, self._store.port), key, self._session.share(items))


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """The rollouts of a step: what the driver knows of the samples, and references to the chunks that hold them."""

    samples: tuple[SampleInfo, ...]
    chunks: ChunkRefs[RolloutChunk]

    @classmethod
    def joined(cls, parts: Sequence[Rollouts]) -> Rollouts:
        """All samples of some parts, whose chunks are numbered on from part to part."""
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
    """vLLM engines, each on ``rollout.tp`` devices.

    Args:
        session: where they run.
        rollout: sampling, lengths and memory.
        model_dir: Hugging Face directory of the model.
        vocab_size: ids that may be sampled lie below it.
        device: ``cuda`` or ``cpu``.
        tokenizer: Hugging Face directory of the tokenizer that reads stop strings; None where there are none.
        weights: ``sync`` starts without any, ``files`` with those of model_dir.
        engine: class of the engines.
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
        self._sleeps = rollout.sleep
        self._store = QueueStore(session)

    def generate(self, requests: Sequence[SampleRequest], chunks: int) -> Rollouts:
        """One response per request, the same whichever engine gives it; waits until the driver knows their lengths.

        Args:
            requests: of the step; neighbours go to one engine, so that samples of one prompt share its prefix.
            chunks: into which to divide them, at most; an engine that is through with one takes another.
        """
        items = [
            WorkItem(chunk=chunk, requests=tuple(of_chunk)) for chunk, of_chunk in enumerate(_shares(requests, chunks))
        ]
        share = math.ceil(len(items) / len(self.processes))
        call = self.stream(RolloutEngine.generate, self._store.queue(items), share)
        parts = {infos[0].chunk: (infos, chunk) for answered in call.wait() for infos, chunk in answered}
        return Rollouts(
            samples=tuple(info for index in range(len(items)) for info in parts[index][0]),
            chunks=ChunkRefs({index: chunk for index, (_, chunk) in sorted(parts.items())}),
        )

    def pick(self, rollouts: Rollouts, samples: Sequence[SampleInfo], chunks: int) -> Rollouts:
        """Some samples in chunks of their own, which the engines put together.

        Args:
            rollouts: with the samples.
            samples: to pick, in their order.
            chunks: into which to divide them, at most.
        """
        shares = dict(enumerate(_shares(samples, chunks)))
        rows = {new: [(sample.chunk, sample.row) for sample in share] for new, share in shares.items()}
        dealt = _dealt(list(shares), len(self.processes))
        requests = [
            PickRequest(
                chunks=rollouts.chunks.only({chunk for new in own for chunk, _ in rows[new]}),
                rows={new: rows[new] for new in own},
            )
            for own in dealt
        ]
        call = self.call_by_chunk(RolloutEngine.pick, requests, dealt)
        picked = (
            replace(sample, chunk=new, row=row) for new, share in shares.items() for row, sample in enumerate(share)
        )
        return Rollouts(samples=tuple(picked), chunks=call.chunks)

    def truncate(self, rollouts: Rollouts, token: int, after: int) -> Rollouts:
        """The rollouts with every response ended by its first ``token`` at an index of at least ``after``.

        Returns:
            Chunks that the engines made, with the same samples in the same places; their lengths, and ``finished``,
            which is whether a response has the token.
        """
        numbers = sorted({sample.chunk for sample in rollouts.samples})
        dealt = _dealt(numbers, len(self.processes))
        requests = [
            TruncateRequest(chunks=rollouts.chunks.only(own), token=token, after=after, own=own) for own in dealt
        ]
        call = self.call_by_chunk(RolloutEngine.truncate, requests, dealt)
        ends = gather_by_chunk(call)
        samples = tuple(
            replace(
                sample,
                response_tokens=ends[sample.chunk][0][sample.row],
                finished=ends[sample.chunk][1][sample.row],
            )
            for sample in rollouts.samples
        )
        return Rollouts(samples=samples, chunks=call.chunks)

    def sleep(self) -> None:
        """Lets the engines give up their weights and caches, where ``rollout.sleep`` says so; waits for them."""
        self._call_if_sleeping(RolloutEngine.sleep)

    def wake_weights(self) -> None:
        """Gives the weights their memory back: the next thing to do is a sync. The counterpart of ``sleep``."""
        self._call_if_sleeping(RolloutEngine.wake_weights)

    def wake_cache(self) -> None:
        """Gives the caches their memory back, after a sync: the engines can answer again."""
        self._call_if_sleeping(RolloutEngine.wake_cache)

    def _call_if_sleeping(self, method: RemoteMethod[RolloutEngine, [], None]) -> None:
        if self._sleeps:
            self.call(method).wait()


def launch_engines(
    config: RunConfig,
    rollout: Rollout,
    session: Session,
    model_dir: str,
    *,
    weights: Literal["sync", "files"],
) -> RolloutGroup:
    """Launches the processes of the engines, and returns at once.

    Args:
        model_dir: Hugging Face directory of the model.
        weights: whether they come by sync, or from model_dir.
    """
    engine = RolloutEngine
    if rollout.record is not None:
        engine = RecordingEngine
    elif rollout.replay is not None:
        engine = ReplayingEngine
    return RolloutGroup(
        session,
        rollout,
        model_dir,
        vocab_size=config.model.vocab_size or model_spec(config.model.hf_config()).dims.vocab,
        device=config.cluster.device,
        tokenizer=(config.model.tokenizer or model_dir) if rollout.stop else None,
        weights=weights,
        engine=engine,
    )


def _dealt(items: Sequence[T], parts: int) -> list[list[T]]:
    """The items dealt out to so many parts."""
    return [list(items[part::parts]) for part in range(parts)]


def _shares(items: Sequence[T], count: int) -> list[Sequence[T]]:
    """Neighbours together, in at most so many parts as equal as can be."""
    count = min(count, len(items))
    bounds = itertools.pairwise(len(items) * part // count for part in range(count + 1))
    return [items[start:stop] for start, stop in bounds]
