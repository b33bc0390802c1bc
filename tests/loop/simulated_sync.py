"""Syncs in simulated time: ranks meet, transfer and commit after random times, and some die or hang meanwhile."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from megarl.cluster.calls import Call, ChunkCall
from megarl.cluster.ray_worker import ChunkRefs
from megarl.groups.resharder import Resharder
from megarl.resharding import SyncStats
from tests.loop.simulated_time import SimulatedMonitor, SimulatedTime

Leave = Callable[[str], None]
"""Lets a rank out of a meeting, with the reason of an abort or none."""


class Meeting:
    """The ranks of a connection, which connect and then sync: a round ends a while after all have come.

    Ranks that wait for others to come hear when the driver aborts the round; in the transfer that follows they see that
    a peer is gone, and not that it hangs. The meeting is the driver's view of the barriers, too.
    """

    def __init__(self, clock: SimulatedTime, chance: random.Random, size: int) -> None:
        self._clock, self._chance, self._size = clock, chance, size
        self._hung: set[int] = set()
        self._gone: set[int] = set()
        self._aborted = ""
        self.begin()

    def begin(self) -> None:
        self._came: dict[int, Leave] = {}
        self._over = False

    def come(self, rank: int, leave: Leave) -> None:
        """A rank comes, and leaves when the round is over."""
        self._came[rank] = leave
        if self._aborted:
            self._let_out(rank)
        elif len(self._came) == self._size:
            self._clock.after(self._chance.random(), self._end)

    def has(self, rank: int) -> bool:
        return rank in self._came

    def absent(self) -> list[int]:
        return [rank for rank in range(self._size) if rank not in self._came]

    def abort(self, reason: str) -> None:
        self._aborted = self._aborted or reason
        if len(self._came) < self._size:
            self._end()

    def lose(self, rank: int) -> None:
        self._gone.add(rank)
        if len(self._came) == self._size:
            self._end()

    def hang(self, rank: int) -> None:
        self._hung.add(rank)

    def _end(self) -> None:
        if self._over or (self._hung and not self._gone):
            return
        self._over = True
        if self._gone:
            self._aborted = self._aborted or f"ranks {self._gone} are gone"
        for rank in list(self._came):
            self._let_out(rank)

    def _let_out(self, rank: int) -> None:
        leave, reason = self._came[rank], self._aborted
        if reason:
            self._clock.after(self._chance.random(), lambda: leave(reason))
        else:
            leave("")


def call_of(monitor: Any, process: Any, label: str = "sync") -> Call[Any]:
    """A call on one process."""
    call = Call[Any](label=label, phase="sync", processes=[process], done=[SimpleNamespace()], monitor=monitor)
    return monitor.follow(call)


def chunk_call_of(monitor: Any, process: Any, label: str) -> ChunkCall[Any, Any]:
    """A call on one process of engines or environments."""
    processes, done = [process], [SimpleNamespace()]
    call = ChunkCall[Any, Any](
        label=label, phase="rollout", processes=processes, done=done, monitor=monitor, chunks=ChunkRefs({})
    )
    return monitor.follow(call)


class Trainers:
    """The actor's ranks, of which there is one. It never fails."""

    def __init__(self, monitor: SimulatedMonitor, chance: random.Random, limit: Callable[[Call[Any]], None]) -> None:
        self._monitor, self._chance, self._limit = monitor, chance, limit
        self.processes = ["trainer"]
        self._meetings: dict[int, Meeting] = {}

    def call_each(self, _connect: object, requests: Sequence[Any]) -> Call[Any]:
        (request,) = requests
        self._meetings[request.link] = request.sync.meeting
        return self._come(request.link, None)

    def call(self, _send: object, version: int, link: int) -> Call[Any]:
        return self._come(link, SyncStats(version=version))

    def _come(self, link: int, result: object) -> Call[Any]:
        call, meeting = call_of(self._monitor, "trainer"), self._meetings[link]

        def leave(error: str) -> None:
            if error:
                call.errors[0] = error
            else:
                call.results[0] = result
            call.ended.set_result(None)

        self._monitor.clock.after(self._chance.random(), lambda: meeting.come(0, leave))
        self._limit(call)
        return call


class Planner:
    """Plans nothing; a connection's name is used once. Some runs send the weights once, and then adapters alone."""

    tp = 1

    def __init__(self, clock: SimulatedTime, chance: random.Random) -> None:
        self._clock, self._chance = clock, chance
        self._names: set[str] = set()
        self.sends_once = chance.random() < 0.5
        self._sent: set[int] = set()

    def plan(self, engines: Sequence[int]) -> None:
        pass

    def spec(self, engines: Sequence[int], name: str, *, adapters_only: bool) -> Any:
        assert engines
        assert not adapters_only or (self.sends_once and self._sent.issuperset(engines))
        self._sent.update(engines)
        assert name not in self._names
        self._names.add(name)
        meeting = Meeting(self._clock, self._chance, 1 + len(engines))
        spec = SimpleNamespace(meeting=meeting, only=lambda _ranks: spec)
        return spec

    def watch(self, spec: Any) -> Meeting:
        return spec.meeting


def resharder(monitor: SimulatedMonitor, chance: random.Random, engines: Any, rollout: Any) -> Resharder:
    """The real one, between simulated ranks."""
    planner: Any = Planner(monitor.clock, chance)
    trainers = Trainers(monitor, chance, engines.limit)
    actor: Any = SimpleNamespace(name="actor", group=SimpleNamespace(named=lambda _name: trainers))
    return Resharder(planner, rollout, actor, engines)
