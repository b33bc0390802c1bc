"""The engines of a run: they share the samples of a step and return them by reference."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Generic, Literal, TypeVar

from megarl.cluster.calls import Call, Phase
from megarl.cluster.ray_worker import ChunkRefs
from megarl.cluster.session import Session
from megarl.config import parse_devices
from megarl.config.schema import Rollout
from megarl.types import Ragged, RolloutChunk, SampleInfo, SampleRequest, WorkItem

Item = TypeVar("Item")
_TIMEOUT = timedelta(seconds=60)


class Offer(Generic[Item]):
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


class WorkQueue:
    """The driver's end: the store with the counters, at which the processes of the session can reach it.

    Args:
        session: of the run.
    """

    def __init__(self, session: Session) -> None:
        from megarl.resharding import serve_store

        self._session = session
        self._store = serve_store(session.host)
        self._offers = itertools.count()

    def offer(self, items: Sequence[Item]) -> Offer[Item]:
        """Offers items; they exist as long as the offer does."""
        key = f"offer {next(self._offers)}"
        return Offer((self._session.host, self._store.port), key, self._session.share(items))


T = TypeVar("T")

ENGINE = "megarl.rollout.engine:RolloutEngine"


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
            chunks=ChunkRefs.joined(part.chunks for part in parts),
        )


class RolloutGroup:
    """vLLM engines, each on ``rollout.tp`` devices.

    Args:
        session: where they run.
        rollout: sampling, lengths and memory.
        model_dir: Hugging Face directory of the model.
        vocab_size: ids that may be sampled lie below it.
        device: ``cuda`` or ``cpu``.
        tokenizer: Hugging Face directory of the tokenizer that reads stop strings; None where there are none.
        weights: ``sync`` starts without any, ``files`` with those of model_dir.
        target: ``package.module:Class`` of the engine.
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
        target: str = ENGINE,
    ) -> None:
        self._session = session
        self._sleeps = rollout.sleep
        self._queue = WorkQueue(session)
        devices = parse_devices(rollout.devices)
        self.processes = [
            session.launch(
                f"rollout engine {engine}",
                devices[engine * rollout.tp : (engine + 1) * rollout.tp],
                target,
                model_dir,
                rollout,
                engine_id=engine,
                vocab_size=vocab_size,
                device=device,
                tokenizer=tokenizer,
                weights=weights,
            )
            for engine in range(rollout.engines)
        ]

    def start(self) -> Call:
        """Starts vLLM in every engine; where weights come by sync, it has none until the first."""
        return self.call("start", "start")

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
        call = self._session.watch.stream(
            "rollout.generate", "rollout", "generate", self.processes, (self._queue.offer(items), share)
        )
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
        call = self._derive(
            "pick",
            list(shares),
            lambda own: (
                rollouts.chunks.only({chunk for new in own for chunk, _ in rows[new]}),
                {new: rows[new] for new in own},
            ),
        )
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
        call = self._derive("truncate", numbers, lambda own: (rollouts.chunks.only(own), own, token, after))
        ends = {chunk: of_rows for result in call.wait() for chunk, of_rows in result.items()}
        samples = tuple(
            replace(
                sample,
                response_tokens=ends[sample.chunk][0][sample.row],
                finished=ends[sample.chunk][1][sample.row],
            )
            for sample in rollouts.samples
        )
        return Rollouts(samples=samples, chunks=call.chunks)

    def logprobs(self, token_ids: Sequence[Sequence[int]]) -> list[Ragged]:
        """Raw teacher-forced log-probabilities of the same sequences by every engine; waits for them.

        Returns:
            By engine, a row of T - 1 float32 nats per sequence of T ids: of its second token to its last.
        """
        return self.call("inference", "logprobs", token_ids).wait()

    def sleep(self) -> None:
        """Lets the engines give up their weights and caches, where ``rollout.sleep`` says so; waits for them."""
        self._move("rollout", "sleep")

    def wake_weights(self) -> None:
        """Gives the weights their memory back: the next thing to do is a sync. The counterpart of ``sleep``."""
        self._move("sync", "wake_weights")

    def wake_cache(self) -> None:
        """Gives the caches their memory back, after a sync: the engines can answer again."""
        self._move("sync", "wake_cache")

    def call(self, phase: Phase, method: str, *args: Any) -> Call:
        """Calls a method on every engine with the same arguments."""
        shared = [args] * len(self.processes)
        return self._session.watch.submit(f"rollout.{method}", phase, method, self.processes, shared)

    def close(self) -> Call:
        """Ends the engines' own processes."""
        return self.call("start", "close")

    def _derive(self, method: str, chunks: Sequence[int], args: Callable[[list[int]], tuple[Any, ...]]) -> Call:
        """Lets the engines share in making chunks; each is sent the arguments for its own."""
        engines = len(self.processes)
        shares = [list(chunks[engine::engines]) for engine in range(engines)]
        by_engine = [args(share) for share in shares]
        return self._session.watch.submit(
            f"rollout.{method}", "rollout", method, self.processes, by_engine, chunks=shares
        )

    def _move(self, phase: Phase, method: str) -> None:
        if self._sleeps:
            self.call(phase, method).wait()


def _shares(items: Sequence[T], count: int) -> list[Sequence[T]]:
    """Neighbours together, in at most so many parts as equal as can be."""
    count = min(count, len(items))
    bounds = itertools.pairwise(len(items) * part // count for part in range(count + 1))
    return [items[start:stop] for start, stop in bounds]
