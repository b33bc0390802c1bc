"""The rollout engines of a run."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from megarl.cluster.calls import Call, ChunkCall, Process, ProcessLostError, WorkerError
from megarl.cluster.process_usage import ProcessUsage
from megarl.cluster.ray_worker import ChunkRefs
from megarl.cluster.session import Session
from megarl.cluster.workers import WorkerGroup
from megarl.config import RunConfig, parse_devices
from megarl.config.schema import Cluster, Rollout
from megarl.conversations.environment_process import TurnRequest
from megarl.groups.engine_load import EngineLoad
from megarl.groups.rollouts import GenerateCall, PendingRollouts, Rollouts, split, work_items
from megarl.models import model_spec
from megarl.remote import RemoteMethod
from megarl.role_specs import adapters_of
from megarl.rollout.completions import ResponseEnds
from megarl.rollout.drafts import DraftCounts
from megarl.rollout.engine import PickRequest, RolloutEngine, TruncateRequest
from megarl.rollout.engine_options import EngineOptions
from megarl.rollout.replay import RecordingEngine, ReplayingEngine
from megarl.rollout.routes import records_routes
from megarl.types import Pickled, RolloutChunk, SampleInfo, SampleRequest, TurnAnswer, WorkItem

_OVERLOAD = 2
"""A prompt leaves the engine that has its beginning where that has so many times the tokens of the least busy one."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A turn of a conversation to sample.

    Args:
        process: index of the process that asks for it.
        engine: engine that has the beginning of the prompt in its cache.
    """

    request: TurnRequest
    process: int
    engine: int | None

    responses = 1

    @property
    def tokens(self) -> int:
        return self.request.tokens


@dataclass(frozen=True, kw_only=True)
class _Item:
    """An item of work that waits for an engine, or is being generated; `done` gets the call that generated it."""

    item: WorkItem
    tokens: int
    done: asyncio.Future[GenerateCall]

    engine = None

    @property
    def responses(self) -> int:
        return len(self.item.requests)


class RolloutGroup(WorkerGroup[RolloutEngine]):
    """vLLM engines, each on `rollout.tp` devices.

    Items of work and turns of conversations wait here in the order of the requests. Of the engines
    that have room and are not held, the one with the fewest tokens in flight takes the next one:
    those of prompts, and those that may be sampled. A turn goes to the engine that has its
    beginning, unless that is overloaded. An engine gets the turns that are ready at the same time
    in one call, and returns those that are finished in another; requests and answers pass this
    process unread. Where engines may be replaced, one that dies or exceeds its time limit is
    started again, and others answer what it was asked; it takes part again after a sync.

    Args:
        model_dir: Hugging Face directory of the model.
        name: name of the processes.
        replacements: number of engines that may be replaced.
    """

    def __init__(
        self,
        session: Session,
        rollout: Rollout,
        model_dir: str,
        options: EngineOptions,
        *,
        name: str = "rollout",
        engine: type[RolloutEngine] = RolloutEngine,
        replacements: int = 0,
    ) -> None:
        devices = parse_devices(rollout.devices)

        def launch(index: int) -> Process[RolloutEngine]:
            worker = partial(engine, model_dir, rollout, options, engine_id=index)
            first = index * rollout.tp
            return session.launch(f"{name} engine {index}", worker, devices[first : first + rollout.tp])

        super().__init__(session, name, [launch(index) for index in range(rollout.engines)])
        self._launch = launch
        self._replacements = replacements
        self.replaced: list[str] = []
        """The cause of each replacement."""
        self.restore: Callable[[], Awaitable[None]] | None = None
        """Gives the engines weights when all of them were replaced; None ends the run."""
        self._numbers = itertools.count()
        self._waiting: list[tuple[int, _Item | Turn]] = []  # a heap
        self._turns: list[dict[int, Turn]] = [{} for _ in range(rollout.engines)]  # being sampled
        self._listening: set[int] = set()  # engines whose sampled turns are awaited
        self.turns_answered: Callable[[Sequence[tuple[Turn, TurnAnswer]], Process[RolloutEngine]], None]
        """Called with sampled turns and the process that sampled them."""
        self._room = [0] * rollout.engines  # responses that each generates at once
        self._starting: dict[int, Call[int]] = {}  # of replaced engines, until they have weights
        self._load = EngineLoad(rollout.engines)
        self._new_tokens = rollout.max_new_tokens
        self._held: set[int] = set()
        self._change = asyncio.Event()  # of what `until` waits for

    async def start(self) -> None:
        """Starts the engines, which take items from then on."""
        self._room = await self.call(RolloutEngine.start)
        self._assign()

    def generate(self, requests: Sequence[SampleRequest], chunks: int) -> PendingRollouts:
        """Generates a response per request; returns at once. Responses do not depend on the engine.

        Args:
            requests: adjacent ones go to one engine, so that the samples of a prompt
                share its prefix.
            chunks: maximum number of chunks.
        """
        answers: list[asyncio.Future[GenerateCall]] = []
        for item in work_items(requests, chunks):
            done = asyncio.get_running_loop().create_future()
            self._push(_Item(item=item, tokens=self._tokens_of(item), done=done))
            answers.append(done)
        self._assign()
        return PendingRollouts(answers=answers)

    def sample(self, turns: Sequence[Turn]) -> None:
        """Samples turns, which `turns_answered` gets; returns at once."""
        for turn in turns:
            self._push(turn)
        self._assign()

    def index(self, process: Process[RolloutEngine]) -> int | None:
        """Returns the number of an engine; None if it was replaced."""
        return self.processes.index(process) if process in self.processes else None

    def _push(self, work: _Item | Turn) -> None:
        heapq.heappush(self._waiting, (next(self._numbers), work))

    @property
    def idle(self) -> bool:
        """Returns whether no engine has responses in progress; items may wait."""
        return not any(self._load.responses)

    @property
    def started(self) -> list[int]:
        """Returns the engines that can get weights: all but replaced ones that are still starting."""
        started: list[int] = []
        for engine in range(len(self.processes)):
            if engine not in self._starting or self._starting[engine].finished:
                started.append(engine)
        return started

    @property
    def replaceable(self) -> bool:
        return self._replacements > 0

    def silent(self, engines: Iterable[int]) -> set[int]:
        """Returns those of some engines that give no sign of life; see `Session.silent`."""
        silent = self._session.silent([self.processes[engine] for engine in engines])
        return {engine for engine in engines if self.processes[engine] in silent}

    def take_metrics(self) -> dict[str, float]:
        """Returns the engines' idle fraction and speed since the last reading."""
        return self._load.take_metrics()

    async def take_usage(self) -> list[ProcessUsage]:
        """Like that of other groups, but without engines that are starting or are lost meanwhile."""
        return await self._of_started(lambda engine: self._call_usage([self.processes[engine]]))

    async def take_drafts(self) -> dict[str, float]:
        """Returns metrics of the drafts of the responses that have ended since the last reading."""
        total = DraftCounts()
        found = await self._of_started(lambda engine: self.call_at(engine, RolloutEngine.take_drafts))
        for counts in found:
            total.add(counts)
        return total.metrics()

    async def _of_started[R](self, call: Callable[[int], Call[R]]) -> list[R]:
        """Calls the engines that have started; returns the results of those that are not lost."""
        readings = [self.spawn(self._results(engine, call(engine))) for engine in self.started]
        results: list[R] = []
        for reading in readings:
            results += await reading or []
        return results

    def _count(self, engine: int, responses: int, tokens: int = 0) -> None:
        """Adds to an engine's responses in progress, and to its tokens in flight."""
        self._load.add(engine, responses, tokens)
        self._notify()

    def _tokens_of(self, item: WorkItem) -> int:
        """Returns the tokens that an item may come to have."""
        tokens = 0
        for request in item.requests:
            tokens += len(request.prompt.token_ids) + (request.max_new_tokens or self._new_tokens)
        return tokens

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits until a condition on the engines holds: on what is in progress, or on which of them have started."""
        while not holds():
            await self._change.wait()

    def _notify(self) -> None:
        """Makes `until` check its condition again."""
        self._change.set()
        self._change = asyncio.Event()

    async def require[R](self, work: Awaitable[R]) -> R:
        """Waits for work that needs engines; raises WorkerError if all engines are lost and get no weights again."""
        awaited = asyncio.ensure_future(work)
        count = len(self.processes)
        while True:
            lost = asyncio.ensure_future(self.until(lambda: len(self._starting) == count))
            await asyncio.wait([awaited, lost], return_when=asyncio.FIRST_COMPLETED)
            lost.cancel()
            if awaited.done():
                return awaited.result()
            if self.restore is None:
                raise WorkerError(f"{self.replaced[-1]}\nNo other engine is left that could answer in its place.")
            await self.restore()

    async def hold(self, engines: Iterable[int], *, drain: bool) -> None:
        """Lets engines take no further items until `readmit`; with `drain`, waits until they have finished theirs."""
        self._held.update(engines)
        if drain:
            await self.until(lambda: not any(self._load.responses[engine] for engine in engines))

    def readmit(self, engines: Iterable[int]) -> None:
        """Reopens engines that have current weights."""
        self._held.difference_update(engines)
        for engine in engines:
            if engine in self._starting:
                self._room[engine] = self._starting.pop(engine).results[0]
        self._assign()

    def close(self) -> Call[None]:
        """Lets every engine end by itself; returns at once. Those that are still starting are ended."""
        started = self.started
        processes: list[Process[RolloutEngine]] = []
        for engine, process in enumerate(self.processes):
            if engine in started:
                processes.append(process)
            else:
                del self._starting[engine]
                self._session.end(process)
        return self.submit(RolloutEngine.close, [()] * len(processes), processes=processes)

    def _assign(self) -> None:
        """Gives waiting items and turns to engines with room."""
        turns: dict[int, list[tuple[int, Pickled[SampleRequest]]]] = {}
        while self._waiting:
            free: list[int] = []
            for engine, responses in enumerate(self._load.responses):
                if engine not in self._held and responses < self._room[engine]:
                    free.append(engine)
            if not free:
                break
            number, work = heapq.heappop(self._waiting)
            in_flight = self._load.tokens
            engine = min(free, key=in_flight.__getitem__)
            if work.engine in free and in_flight[work.engine] <= _OVERLOAD * (in_flight[engine] + work.tokens):
                engine = work.engine
            self._count(engine, work.responses, work.tokens)
            if isinstance(work, Turn):
                self._turns[engine][number] = work
                turns.setdefault(engine, []).append((number, work.request.request))
            else:
                call = self.call_one(engine, RolloutEngine.generate, work.item, [work.item.chunk])
                self.spawn(self._finish(engine, number, work, call))
        for engine, requests in turns.items():
            call = self.call_at(engine, RolloutEngine.sample_turns, requests)
            if self.replaceable:
                self.spawn(self._results(engine, call))
            if engine not in self._listening:
                self._listening.add(engine)
                self.spawn(self._take_turns(engine))

    async def _finish(self, engine: int, number: int, work: _Item, call: GenerateCall) -> None:
        """Waits for an item; that of a lost engine waits for another one."""
        results = await self._results(engine, call)
        if results is None:
            heapq.heappush(self._waiting, (number, work))
            self._assign()
            return
        (samples,) = results
        (process,) = call.processes
        if self.processes[engine] is process:
            self._count(engine, -work.responses, -work.tokens)
            self._load.wrote(engine, sum(sample.response_tokens for sample in samples))
        work.done.set_result(call)
        self._assign()

    async def _take_turns(self, engine: int) -> None:
        """Passes on the turns that an engine samples, as long as it has any; those of a lost engine wait again."""
        process = self.processes[engine]
        while self._turns[engine]:
            call: Call[Any] = self.call_at(engine, RolloutEngine.sampled_turns)
            results = await self._results(engine, call)
            if results is None or self.processes[engine] is not process:
                return
            answers: list[tuple[Turn, TurnAnswer]] = []
            for answer in results[0]:
                turn = self._turns[engine].pop(answer.number)
                self._count(engine, -1, -turn.tokens)
                self._load.wrote(engine, answer.tokens)
                answers.append((turn, answer))
            self.turns_answered(answers, process)
            self._assign()
        self._listening.discard(engine)

    async def _results[R](self, engine: int, call: Call[R]) -> list[R] | None:
        """Waits for a call on an engine; None if the engine is lost, which is then replaced."""
        call.survives_loss = self.replaceable
        try:
            return await call
        except ProcessLostError as error:
            self.replace(engine, call.processes[0], str(error))
            return None

    def replace(self, engine: int, process: Process[RolloutEngine], cause: str) -> None:
        """Ends the process of an engine, which may be dead, and starts another one, unless that was done before.

        Raises:
            WorkerError: No further engine may be replaced.
        """
        if self.processes[engine] is not process:
            return
        if len(self.replaced) >= self._replacements:
            limit = f"rollout.max_replacements = {self._replacements}"
            raise WorkerError(f"{cause}\nNo engine is replaced any more: {limit} is reached.")
        self.replaced.append(cause)
        self._count(engine, -self._load.responses[engine], -self._load.tokens[engine])
        self._room[engine] = 0
        for number, turn in self._turns[engine].items():
            heapq.heappush(self._waiting, (number, turn))
        self._turns[engine] = {}
        self._listening.discard(engine)
        self._session.end(process)
        self.processes[engine] = self._launch(engine)
        call = self.call_at(engine, RolloutEngine.start)
        call.survives_loss = True
        self._starting[engine] = call
        self.spawn(self._watch_start(engine, call))
        self._notify()
        first = cause.splitlines()[0]
        print(f"{first} It is replaced; its responses in progress are generated again.", file=sys.stderr)
        self._assign()

    async def _watch_start(self, engine: int, call: Call[int]) -> None:
        """Replaces an engine that is lost while it starts, unless it was to be closed."""
        try:
            await call
        except ProcessLostError as error:
            if self._starting.get(engine) is call:
                self.replace(engine, call.processes[0], str(error))
        self._notify()

    async def pick(self, rollouts: Rollouts, samples: Sequence[SampleInfo], chunks: int) -> Rollouts:
        """Copies samples, in their order, into at most `chunks` new chunks, branches together."""
        by_conversation = itertools.groupby(samples, key=lambda sample: sample.conversation)
        conversations = [list(branches) for _, branches in by_conversation]
        rows: dict[int, list[tuple[int, int]]] = {}  # by new chunk
        picked: list[SampleInfo] = []
        for new, part in enumerate(split(conversations, chunks)):
            rows[new] = []
            for sample in itertools.chain(*part):
                picked.append(replace(sample, chunk=new, row=len(rows[new])))
                rows[new].append((sample.chunk, sample.row))

        def request(numbers: Sequence[int]) -> PickRequest:
            old: set[int] = set()
            for new in numbers:
                old.update(chunk for chunk, _ in rows[new])
            return PickRequest(chunks=rollouts.chunks.only(old), rows={new: rows[new] for new in numbers})

        calls = await self._divide(RolloutEngine.pick, request, list(rows))
        return Rollouts(samples=tuple(picked), chunks=ChunkRefs[RolloutChunk].of(call.chunks for call in calls))

    async def truncate(self, rollouts: Rollouts, token: int, after: int) -> Rollouts:
        """Ends every response after its first `token` at an index of at least `after`; see `Rollouts.truncated`."""

        def request(numbers: Sequence[int]) -> TruncateRequest:
            return TruncateRequest(chunks=rollouts.chunks.only(numbers), token=token, after=after, assigned=numbers)

        chunks = sorted({sample.chunk for sample in rollouts.samples})
        calls = await self._divide(RolloutEngine.truncate, request, chunks)
        ends: dict[int, ResponseEnds] = {}
        for call in calls:
            ends |= call.results[0]
        return rollouts.truncated(ends, ChunkRefs[RolloutChunk].of(call.chunks for call in calls))

    async def _divide[Q](
        self, method: RemoteMethod[RolloutEngine, [Q], Any], make: Callable[[Sequence[int]], Q], chunks: Sequence[int]
    ) -> list[ChunkCall[Any, RolloutChunk]]:
        """Calls a method by chunk, on the engines that have started, or on all if none has; returns the calls."""
        engines = self.started or range(len(self.processes))
        parts: list[asyncio.Task[ChunkCall[Any, RolloutChunk]]] = []
        for index, engine in enumerate(engines):
            numbers = chunks[index :: len(engines)]
            if numbers:
                parts.append(self.spawn(self._call_part(engine, method, make(numbers), numbers)))
        return [await part for part in parts]

    async def _call_part[Q](
        self, engine: int, method: RemoteMethod[RolloutEngine, [Q], Any], request: Q, chunks: Sequence[int]
    ) -> ChunkCall[Any, RolloutChunk]:
        """Calls a method on an engine, or on another one if that is lost."""
        while True:
            process = self.processes[engine]
            call = self.submit(method, [(request,)], chunks=[chunks], processes=[process])
            if engine in self._starting:
                call.after = [self._starting[engine]]
            if await self._results(engine, call) is not None:
                return call
            engine = next(iter(self.started), engine)


def engine_options(
    cluster: Cluster, vocab_size: int, weights: Literal["sync", "files"], tokenizer: str | None = None
) -> EngineOptions:
    """Returns the options of engines on a run's devices."""
    memory = None
    if cluster.device_memory_gib is not None:
        memory = int(cluster.device_memory_gib * 2**30)
    return EngineOptions(
        vocab_size=vocab_size,
        device=cluster.device,
        tokenizer=tokenizer,
        weights=weights,
        device_memory=memory,
        threads=cluster.threads_per_device.engines or 1,
    )


def launch_engines(
    config: RunConfig,
    rollout: Rollout,
    session: Session,
    model_dir: str,
    *,
    weights: Literal["sync", "files"],
    besides_cache: int,
) -> RolloutGroup:
    """Launches the engines, and returns at once; see `RolloutGroup`, and `EngineOptions` for `besides_cache`."""
    engine = RolloutEngine
    if rollout.record is not None:
        engine = RecordingEngine
    elif rollout.replay is not None:
        engine = ReplayingEngine
    spec = model_spec(config.model.hf_config())
    vocab = spec.ids_in_use(config.model.vocab_size)
    tokenizer = None
    if rollout.stop:
        tokenizer = config.model.tokenizer_directory(model_dir)
    options = replace(
        engine_options(config.cluster, vocab, weights, tokenizer),
        besides_cache=besides_cache,
        kept_max=config.recorded_kept_max,
        records_routes=config.replays_routes and records_routes(spec, config.cluster.device),
        adapters=None if config.separate_adapters is None else adapters_of(config.separate_adapters),
    )
    replacements = rollout.max_replacements if weights == "sync" else 0
    return RolloutGroup(session, rollout, model_dir, options, engine=engine, replacements=replacements)
