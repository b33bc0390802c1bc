"""The rollout engines of a run, and the rollouts that they return by reference."""

from __future__ import annotations

import heapq
import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, TypeVar

from megarl.cluster.calls import (
    Awaited,
    Call,
    CallMonitor,
    ChunkCall,
    Condition,
    Process,
    Routine,
    Task,
    WorkerError,
    gather_by_chunk,
)
from megarl.cluster.ray_worker import ChunkRefs
from megarl.cluster.session import Session
from megarl.cluster.workers import WorkerGroup
from megarl.config import RunConfig, parse_devices
from megarl.config.schema import Rollout
from megarl.models import model_spec, vocab_size
from megarl.rollout.engine import Ends, PickRequest, RolloutEngine, TruncateRequest
from megarl.rollout.replay import RecordingEngine, ReplayingEngine
from megarl.types import RolloutChunk, SampleInfo, SampleRequest, WorkItem

R = TypeVar("R")
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
            for own in _split(range(len(self.chunks)), count)
        ]


@dataclass(eq=False, kw_only=True)
class PendingRollouts:
    """Rollouts that are being generated."""

    items: Sequence[WorkItem]
    engines: RolloutGroup
    answers: dict[int, ChunkCall[list[SampleInfo], RolloutChunk]] = field(default_factory=dict)  # by chunk

    @property
    def finished(self) -> bool:
        return all(item.chunk in self.answers for item in self.items)

    def parts(self, count: int) -> list[PendingRollouts]:
        """Returns what `Rollouts.parts` returns of the result; each part is finished with its own last response."""
        return [replace(self, items=items) for items in _split(self.items, count)]

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
            lengths, finished = ends[sample.chunk]
            samples.append(replace(sample, response_tokens=lengths[sample.row], finished=finished[sample.row]))
        return Rollouts(samples=tuple(samples), chunks=self.call.chunks)


class RolloutGroup(WorkerGroup[RolloutEngine]):
    """vLLM engines, each on `rollout.tp` devices.

    Items of work wait here in the order in which they were asked for. The engine with the fewest responses in progress
    takes the next one, as long as it has room. Where engines may be replaced, one that dies or exceeds its time limit
    is started again, and others answer what it was asked; it takes part again after the next sync.

    Args:
        model_dir: Hugging Face directory of the model.
        vocab_size: upper bound of the sampled token ids.
        tokenizer: Hugging Face directory of the tokenizer; needed for stop strings only.
        weights: `sync` starts without weights, `files` with those in `model_dir`.
        replacements: how many engines may be replaced.
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
        replacements: int = 0,
    ) -> None:
        devices = parse_devices(rollout.devices)

        def launch(index: int) -> Process[RolloutEngine]:
            return session.launch_stepping(
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

        super().__init__(session, "rollout", [launch(index) for index in range(rollout.engines)])
        self._launch, self._replacements = launch, replacements
        self.replaced: list[str] = []
        """The cause of each replacement."""
        self._numbers = itertools.count()
        self._waiting: list[tuple[int, WorkItem, PendingRollouts]] = []  # a heap
        self._room = [0] * rollout.engines
        self._new_room: dict[int, int] = {}
        self._in_progress = [0] * rollout.engines
        self._paused = False
        self._busy_s, self._tokens = [0.0] * rollout.engines, [0] * rollout.engines
        self._changed = [time.perf_counter()] * (rollout.engines + 1)  # of each engine, and of the last reading

    def start(self) -> Call[int]:
        """Starts the engines, and returns at once."""
        call = self.call(RolloutEngine.start)
        call.then = lambda: self._open(call.results)
        return call

    def _open(self, room: Mapping[int, int]) -> None:
        """Lets engines take items; `room` is the number of responses that each generates at once."""
        for engine, responses in room.items():
            self._room[engine] = responses
        self._assign()

    def generate(self, requests: Sequence[SampleRequest], chunks: int) -> PendingRollouts:
        """Generates a response per request; returns at once. Responses do not depend on the engine.

        Args:
            requests: adjacent ones go to one engine, so that the samples of a prompt share its prefix.
            chunks: maximum number of chunks.
        """
        parts = enumerate(_split(requests, chunks))
        items = [WorkItem(chunk=chunk, requests=tuple(part)) for chunk, part in parts]
        pending = PendingRollouts(items=items, engines=self)
        for item in items:
            heapq.heappush(self._waiting, (next(self._numbers), item, pending))
        self._assign()
        return pending

    @property
    def monitor(self) -> CallMonitor:
        return self._session.monitor

    @property
    def idle(self) -> bool:
        """Returns whether no engine has responses in progress; items may wait."""
        return not any(self._in_progress)

    @property
    def all_lost(self) -> bool:
        """Returns whether every engine was replaced since the last sync: none has weights."""
        return len(self._new_room) == len(self.processes)

    def take_metrics(self) -> dict[str, float]:
        """Returns the engines' idle fraction and speed since the last reading.

        An engine is busy while it has responses in progress, whose tokens count when all of a chunk are finished.
        """
        for engine in range(len(self.processes)):
            self._count(engine, 0)
        now, before = time.perf_counter(), self._changed[-1]
        busy, self._busy_s, self._changed[-1] = self._busy_s, [0.0] * len(self.processes), now
        tokens, self._tokens = self._tokens, [0] * len(self.processes)
        metrics = {"rollout/engine_idle": 1 - sum(busy) / len(busy) / (now - before)}
        speeds = [written / seconds for written, seconds in zip(tokens, busy, strict=True) if written]
        if speeds:
            metrics["perf/rollout_tokens_per_second"] = sum(tokens) / max(busy)
            metrics["perf/engine_tokens_per_second_min"] = min(speeds)
            metrics["perf/engine_tokens_per_second_max"] = max(speeds)
        return metrics

    def _count(self, engine: int, responses: int) -> None:
        """Adds to an engine's responses in progress."""
        now = time.perf_counter()
        if self._in_progress[engine]:
            self._busy_s[engine] += now - self._changed[engine]
        self._changed[engine] = now
        self._in_progress[engine] += responses

    def wait_until(self, awaited: Awaited) -> None:
        """Waits until `awaited` is finished, or all engines are lost."""
        self.monitor.wait_until(Condition(lambda: awaited.finished or self.all_lost))

    def require(self, awaited: Awaited) -> None:
        """Waits until `awaited` is finished; raises WorkerError if all engines are lost."""
        self.wait_until(awaited)
        if not awaited.finished:
            raise WorkerError(f"{self.replaced[-1]}\nNo other engine is left that could answer in its place.")

    def run(self, routine: Routine[R]) -> R:
        """Runs a routine to its end, and returns its result; raises WorkerError as `require` does."""
        task = Task(routine)
        while not task.finished:
            self.require(task.advance())
        return task.result

    def pause(self) -> None:
        """Lets no engine take further items."""
        self._paused = True

    def resume(self) -> None:
        """Ends `pause`, after a sync or instead of one."""
        self._paused = False
        self._assign()

    def wait_for_replacements(self) -> None:
        """Waits until replaced engines have started."""
        self.monitor.wait_until(Condition(lambda: all(self._new_room.values())))

    def readmit(self) -> None:
        """Lets replaced engines take items, which have weights now."""
        room, self._new_room = self._new_room, {}
        self._open(room)

    def _assign(self) -> None:
        """Gives waiting items to engines with room."""
        while self._waiting and not self._paused:
            free = [engine for engine, room in enumerate(self._room) if self._in_progress[engine] < room]
            if not free:
                return
            engine = min(free, key=lambda index: self._in_progress[index] / self._room[index])
            number, item, pending = heapq.heappop(self._waiting)
            self._count(engine, len(item.requests))
            call = self.call_one(engine, RolloutEngine.generate, item, [item.chunk])
            call.then = partial(self._finish, engine, self.processes[engine], item, pending, call)
            if self._replacements:
                call.lost = partial(self._lose, engine, self.processes[engine], (number, item, pending))

    def _finish(
        self,
        engine: int,
        process: Process[RolloutEngine],
        item: WorkItem,
        pending: PendingRollouts,
        call: ChunkCall[list[SampleInfo], RolloutChunk],
    ) -> None:
        if self.processes[engine] is process:
            self._count(engine, -len(item.requests))
            self._tokens[engine] += sum(sample.response_tokens for sample in call.results[0])
        pending.answers[item.chunk] = call
        self._assign()

    def _lose(
        self,
        engine: int,
        process: Process[RolloutEngine],
        asked: tuple[int, WorkItem, PendingRollouts],
        cause: str,
    ) -> None:
        """Lets other engines answer an item of a lost engine, which is replaced; raises WorkerError at the limit."""
        heapq.heappush(self._waiting, asked)
        if self.processes[engine] is process:
            if len(self.replaced) >= self._replacements:
                limit = f"rollout.max_replacements = {self._replacements}"
                raise WorkerError(f"{cause}\nNo engine is replaced any more: {limit} is reached.")
            self._replace(engine, cause)
        self._assign()

    def _replace(self, engine: int, cause: str) -> None:
        """Ends a process, which may be dead, and starts another one in its place."""
        self.replaced.append(cause)
        self._count(engine, -self._in_progress[engine])
        self._room[engine] = 0
        self._session.end(self.processes[engine])
        self.processes[engine] = self._launch(engine)
        self._new_room[engine] = 0
        call = self.submit(RolloutEngine.start, [()], processes=[self.processes[engine]])
        call.then = lambda: self._new_room.update({engine: call.results[0]})
        first = cause.splitlines()[0]
        print(f"{first} It is replaced; its responses in progress are generated again.", file=sys.stderr, flush=True)

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

    def truncate(self, rollouts: Rollouts, token: int, after: int) -> PendingTruncation:
        """Ends every response after its first `token` at an index of at least `after`; returns at once."""
        own_chunks = self._deal(sorted({sample.chunk for sample in rollouts.samples}))
        requests = [
            TruncateRequest(chunks=rollouts.chunks.only(own), token=token, after=after, own=own) for own in own_chunks
        ]
        call = self.call_by_chunk(RolloutEngine.truncate, requests, own_chunks)
        return PendingTruncation(rollouts=rollouts, call=call)

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
        replacements=rollout.max_replacements if weights == "sync" else 0,
    )


def _split(items: Sequence[T], count: int) -> list[Sequence[T]]:
    """Splits into at most `count` parts of adjacent items, with sizes that differ by at most 1."""
    count = min(count, len(items))
    bounds = itertools.pairwise(len(items) * part // count for part in range(count + 1))
    return [items[start:stop] for start, stop in bounds]
