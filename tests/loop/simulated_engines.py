"""Engines in simulated time, some of which die or hang."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

from megarl.cluster.calls import Call, ChunkCall, ProcessLostError
from megarl.data.stream import stable_hash
from megarl.groups.engines import RolloutGroup
from megarl.resharding import SyncStats
from megarl.rollout.completions import Response, pack_chunk, select_rows
from megarl.types import Pickled, SampledTurn, SampleRequest, TurnAnswer, VersionSpan, WorkItem
from tests.cluster.fakes import OPTIONS
from tests.loop.simulated_sync import Meeting, call_of, chunk_call_of
from tests.loop.simulated_time import SimulatedMonitor

seeded = cache(stable_hash)
"""Schedules have the same requests."""


@dataclass(eq=False)
class Running:
    """A response in progress: its number of tokens, when it began and ends, and how many tokens each version wrote."""

    tokens: int
    start: float
    seconds: float
    versions: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    def written(self, now: float) -> int:
        return min(self.tokens, int(self.tokens * (now - self.start) / self.seconds)) if self.seconds else self.tokens

    def spans(self, engine: int) -> tuple[VersionSpan, ...]:
        starts = [start for start, _ in self.versions]
        return tuple(
            VersionSpan(start=start, stop=stop, version=version, engine_id=engine)
            for (start, version), stop in zip(self.versions, [*starts[1:], self.tokens], strict=True)
            if stop > start
        )


SYNC_LIMIT, ROLLOUT_LIMIT = 20.0, 200.0
"""More than a sync, and a part of the responses, take whose engines are well."""


class Engines(RolloutGroup):
    """The real group; its processes answer after random, sometimes long times, and some die or hang.

    Args:
        losses: the largest number of those that die or hang.
        start_s: the longest start of a new one.
    """

    def __init__(
        self, monitor: SimulatedMonitor, chance: random.Random, *, engines: int, mode: str, losses: int, start_s: float
    ) -> None:
        session: Any = SimpleNamespace(
            monitor=monitor, launch=lambda *_, **__: object(), end=self._kill, silent=self._silent
        )
        rollout: Any = SimpleNamespace(devices=f"0-{engines - 1}", tp=1, engines=engines, max_new_tokens=7)
        super().__init__(session, rollout, "nowhere", OPTIONS, replacements=losses)
        self.monitor = monitor
        self._clock, self._chance, self._mode, self._start_s = monitor.clock, chance, mode, start_s
        self.versions: dict[Any, int] = {}
        self.running: dict[Running, Any] = {}
        self.ills: dict[Any, str] = {}
        """What became of processes: they are dead, stuck in a step, or stopped."""
        self.begun_in_syncs = 0
        """Items that engines took while others were held."""
        self.recorded: dict[str, Response] = {}
        """The last response to each request, by its sample id."""
        self._polls: dict[Any, Call[Any]] = {}
        self._sampled: dict[Any, list[TurnAnswer]] = {}
        self._mixed: set[Any] = set()
        self._calls: list[Call[Any]] = []
        self._meetings: dict[Any, tuple[Meeting, int]] = {}
        self._room = [3] * engines

    def call_one(self, process: int, method: object, item: WorkItem, chunks: Sequence[int]) -> ChunkCall[Any, Any]:
        """Each token takes a while; a chunk arrives with its last token."""
        mine = self.processes[process]
        self.begun_in_syncs += any(self.processes[engine] in self.versions for engine in self._held)
        running = [self._begin(mine, request) for request in item.requests]
        call = chunk_call_of(self.monitor, mine, "generate")

        def finish() -> None:
            if mine in self.ills:
                return
            if mine in self._mixed:  # it continues after a sync
                self._clock.after(1.0, finish)
                return
            for response in running:
                del self.running[response]
            responses = [
                answer(request, response, process) for request, response in zip(item.requests, running, strict=True)
            ]
            self.recorded.update({response.request.sample_id: response for response in responses})
            infos, call.chunks._refs[item.chunk] = pack_chunk(item.chunk, responses)
            self._answer(call, infos)

        self._follow(call, ROLLOUT_LIMIT)
        self._clock.after(max(response.seconds for response in running), finish)
        return call

    def call_at(self, process: int, method: Any, *args: Any, **_: Any) -> Call[Any]:
        """Starts an engine, connects it, gives it weights, or samples turns."""
        mine = self.processes[process]
        call = call_of(self.monitor, mine, method.name)
        if method.name in ("sample_turns", "sampled_turns"):
            self._follow(call, ROLLOUT_LIMIT)
            if method.name == "sample_turns":
                self._sample_turns(process, call, *args)
            else:
                self._polls[mine] = call
                self._hand_out(mine)
            return call
        self._follow(call, 2 * self._start_s if method.name == "start" else SYNC_LIMIT)
        if method.name == "start":
            self._clock.after(self._start_s * self._chance.uniform(0.5, 1), lambda: self._answer(call, 3))
            return call
        if method.name == "connect":
            (request,) = args
            self._meetings[mine] = request.sync.meeting, request.ranks[0]
        elif self._mode != "inflight":
            assert mine not in self.running.values(), "a sync while responses are in progress"
        meeting, rank = self._meetings[mine]

        def leave(aborted: str) -> None:
            if mine in self.ills:
                return
            if aborted:
                self._mixed.update([mine] if method.name != "connect" and self._chance.random() < 0.7 else [])
                call.errors[0] = aborted
                call.ended.set_result(None)
                return
            if method.name != "connect":
                self._commit(mine, *args)
            self._answer(call, [SyncStats(version=version) for version in args])

        def come() -> None:
            if mine not in self.ills:
                meeting.come(rank, leave)

        self._clock.after(self._chance.random(), come)
        return call

    def _sample_turns(self, process: int, call: Call[Any], requests: Sequence[tuple[int, Any]]) -> None:
        """Each turn arrives with its last token."""
        mine = self.processes[process]
        self.begun_in_syncs += any(self.processes[engine] in self.versions for engine in self._held)
        for number, pickled in requests:
            request = pickled.value()
            response = self._begin(mine, request)
            self._clock.after(response.seconds, partial(self._end_turn, process, mine, number, request, response))
        self._clock.after(0.01 * self._chance.random(), lambda: self._answer(call, None))

    def _end_turn(self, process: int, mine: Any, number: int, request: SampleRequest, response: Running) -> None:
        if mine in self.ills:
            return
        if mine in self._mixed:  # it continues after a sync
            self._clock.after(1.0, partial(self._end_turn, process, mine, number, request, response))
            return
        del self.running[response]
        answered = answer(request, response, process)
        self.recorded[request.sample_id] = answered
        turn = SampledTurn.of(pack_chunk(0, [answered])[1])
        found = TurnAnswer(number=number, tokens=len(turn.token_ids), turn=Pickled.of(turn))
        self._sampled.setdefault(mine, []).append(found)
        self._hand_out(mine)

    def _hand_out(self, mine: Any) -> None:
        """Answers the process's call for turns a little later, with all that there are then."""

        def give() -> None:
            call = self._polls.get(mine)
            if call is not None and self._sampled.get(mine):
                del self._polls[mine]
                self._answer(call, self._sampled.pop(mine))

        if mine in self._polls and self._sampled.get(mine):
            self._clock.after(self._chance.choice([0.0, 0.1]) * self._chance.random(), give)

    def limit(self, call: Call[Any], seconds: float = SYNC_LIMIT) -> None:
        """Acts like the monitor on an overdue call."""

        def end() -> None:
            message = f"{call.label} takes too long."
            if call.finished or call not in self._calls:
                return
            if call.late is not None and call.late(message):
                self.limit(call, seconds)
            else:
                self._lose_call(call, message)

        self._calls.append(call)
        self._clock.after(seconds, end)

    def _follow(self, call: Call[Any], seconds: float) -> None:
        """Watches a call, in which the process may die or hang."""
        (process,) = call.processes
        self.limit(call, seconds)
        if self.ills.get(process) == "dead":
            self._clock.after(self._chance.random(), lambda: self._lose_call(call, f"{call.label}: it is dead."))
        elif self._replacements and self._chance.random() < 0.1:
            self._clock.after(2 * self._chance.random(), lambda: self._strike(process))

    def _strike(self, process: Any) -> None:
        """A process dies or hangs, busy or idle."""
        if process in self.ills or process not in self.processes or len(self.ills) == self._replacements:
            return
        ill = self._chance.choice(["dead", "stuck", "stopped"])
        meeting, rank = self._meetings.get(process, (None, 0))
        if ill == "dead":
            self._kill(process)
        elif meeting is not None and meeting.has(rank):
            self.ills[process] = "stopped"
            meeting.hang(rank)
        else:
            self.ills[process] = ill

    def _kill(self, process: Any) -> None:
        self.ills[process] = "dead"
        self.running = {response: own for response, own in self.running.items() if own is not process}
        if process in self._meetings:
            meeting, rank = self._meetings[process]
            meeting.lose(rank)
        for call in [call for call in self._calls if process in call.processes and not call.finished]:
            cause = f"{call.label}: it has died."
            self._clock.after(self._chance.random(), lambda call=call, cause=cause: self._lose_call(call, cause))

    def _silent(self, processes: Sequence[Any]) -> list[Any]:
        return [process for process in processes if self.ills.get(process) == "stopped"]

    def _lose_call(self, call: Call[Any], cause: str) -> None:
        if call in self._calls and not call.ended.done():
            assert call.survives_loss, cause
            self._calls.remove(call)
            call.ended.set_exception(ProcessLostError(cause))
            call.ended.exception()  # nobody may wait for it

    def _answer(self, call: Call[Any], result: object) -> None:
        (process,) = call.processes
        if process in self.ills or call not in self._calls:
            return
        self._calls.remove(call)
        call.results[0] = result
        call.ended.set_result(None)

    def _begin(self, process: Any, request: SampleRequest) -> Running:
        assert process in self.versions, "an engine without weights"
        assert process not in self._mixed, "an engine with half of its weights"
        tokens = seeded(request.seed, "tokens") % 7 + 1
        seconds = self._chance.choice([0.0, 1.0, 1.0, 2.0, 20.0]) * self._chance.random()
        versions = [(0, self.versions[process])]
        response = Running(tokens=tokens, start=self._clock.now, seconds=seconds, versions=versions)
        self.running[response] = process
        return response

    def _commit(self, process: Any, version: int) -> None:
        for response, own in self.running.items():
            if own is process:
                response.versions.append((response.written(self._clock.now), version))
        self.versions[process] = version
        self._mixed.discard(process)

    def submit(
        self, method: Any, args: Any, kwargs: Any = None, chunks: Any = None, processes: Any = None
    ) -> ChunkCall[Any, Any]:
        """Copies samples; a call is one process's part."""
        ((request,),), (own,) = args, chunks
        (process,) = processes
        call = chunk_call_of(self.monitor, process, method.name)

        def finish() -> None:
            call.chunks._refs.update({chunk: select_rows(request.chunks, request.rows[chunk]) for chunk in own})
            self._answer(call, None)

        self._follow(call, ROLLOUT_LIMIT)
        self._clock.after(self._chance.random(), finish)
        return call


def answer(request: SampleRequest, response: Running, engine: int) -> Response:
    """Tokens of the seed and their versions; of whole responses, every other one has a given token before each."""
    spans = response.spans(engine)
    token_ids: list[int] = []
    loss_mask = None
    for span in spans:
        token_ids += [seeded(request.seed, span.version) % 97] * (span.stop - span.start)
    if request.seed % 2 == 1 and "/turn-" not in request.sample_id:
        token_ids = [token for sampled in token_ids for token in (97, sampled)]
        loss_mask = [False, True] * response.tokens
    return Response(
        request=request,
        token_ids=token_ids,
        logprobs=[0.0] * response.tokens,
        finished=True,
        versions=spans,
        loss_mask=loss_mask,
    )
