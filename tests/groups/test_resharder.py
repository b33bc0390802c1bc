"""The driver's calls on the ranks of a sync, and its report of their results."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.cluster.calls import WorkerError
from megarl.config import load
from megarl.groups.resharder import Resharder, SyncPlanner, SyncReport
from megarl.remote import RemoteMethod
from megarl.resharding import SyncSpec, SyncStats
from megarl.stages.ppo.config import PPOConfig
from megarl.types import Layout
from tests.loop.answers import Answered

ACTOR = Layout(tp=2, pp=2)
TP2_ENGINES = ["rollout.devices=0-3", "rollout.tp=2", "cluster.nodes=2", "cluster.devices_per_node=2"]


async def done(*_: object, **__: object) -> None:
    """In place of a coroutine that has nothing to wait for."""


@dataclass
class Calls:
    """Stands in for all processes: records the calls, and returns what the test sets."""

    answers: Iterator[Any] = field(default_factory=lambda: itertools.repeat(None))
    asked: list[tuple[str, Any]] = field(default_factory=list)
    engines_asked: list[int] = field(default_factory=list)

    def call_each(self, method: RemoteMethod[Any, ..., Any], requests: Sequence[Any]) -> Any:
        """All processes of the group answer, each with an answer of its own; an error is that of all of them."""
        self.asked += [(method.name, request) for request in requests]
        answers = [next(self.answers) for _ in requests]
        return Answered(
            processes=["process"] * len(requests),
            finished=True,
            results={i: answer for i, answer in enumerate(answers) if not isinstance(answer, WorkerError)},
            errors={i: str(answer) for i, answer in enumerate(answers) if isinstance(answer, WorkerError)},
        )

    def call(self, method: RemoteMethod[Any, ..., Any], *args: object) -> Any:
        return self.call_each(method, [args] * 4)

    def call_at(self, engine: int, method: RemoteMethod[Any, ..., Any], *args: object) -> Any:
        self.engines_asked.append(engine)
        call = self.call_each(method, args)
        call.processes = [f"engine {engine}"]
        return call

    def engines(self, started: Sequence[int]) -> Any:
        """Two engines, some of which have started."""
        return SimpleNamespace(
            processes=["engine 0", "engine 1"],
            started=list(started),
            call_at=self.call_at,
            hold=done,
            readmit=lambda _engines: None,
            until=done,
            spawn=asyncio.ensure_future,
            replaceable=False,
        )

    def actor(self) -> Any:
        group = SimpleNamespace(name="train", processes=[*range(4)], call=self.call, call_each=self.call_each)
        group.named = lambda _name: group
        return SimpleNamespace(name="actor", layout=ACTOR, group=group)


def resharder(calls: Calls, *overrides: str, started: Sequence[int] = (0, 1)) -> Resharder:
    """From four trainers to two engines of two ranks, on two nodes."""
    config = load("configs/debug/ppo.yaml", [*TP2_ENGINES, *overrides])
    assert isinstance(config, PPOConfig)
    session: Any = SimpleNamespace(host="127.0.0.1")
    planner = SyncPlanner(session, config, calls.actor())
    return Resharder(planner, config.rollout, calls.actor(), calls.engines(started))


async def specs(calls: Calls, *overrides: str, started: Sequence[int] = (0, 1)) -> list[tuple[SyncSpec, Sequence[int]]]:
    """The connection specs of every process, the trainers first."""
    await resharder(calls, *overrides, started=started).connect()
    assert {name for name, _ in calls.asked} == {"connect"}
    return [(request.sync, request.ranks) for _, request in calls.asked]


async def test_every_process_gets_its_own_part_of_the_plan() -> None:
    told = await specs(Calls())
    assert [list(ranks) for _, ranks in told] == [[0], [1], [2], [3], [4, 5], [6, 7]]
    for spec, ranks in told:
        receivers = {rank for rank, buffer in spec.recv_buffers.items() if buffer.messages}
        assert set(spec.senders) | receivers == set(ranks)
        assert (spec.world_size, spec.verify) == (8, True)
    assert len({spec.fingerprint for spec, _ in told}) == 1


@pytest.mark.parametrize(("transport", "framed"), [("auto", ({2, 3}, {0, 1})), ("gloo", ({0, 1, 2, 3},) * 2)])
async def test_transport_follows_from_nodes_and_configuration(transport: str, framed: Sequence[set[int]]) -> None:
    """TP2 x PP2 has each half of the layers on one of the nodes; each engine is on one, too."""
    told = await specs(Calls(), f"resharding.transport={transport}", "resharding.verify=false")
    for (spec, ranks), far in zip(told[4:], framed, strict=True):
        assert {sender for rank in ranks for sender in spec.recv_buffers[rank].via_network} == far
        assert not spec.verify


async def test_engines_that_have_not_started_are_left_out() -> None:
    """The second engine alone is on the second node, as half of the trainers."""
    told = await specs(Calls(), started=[1])
    assert [list(ranks) for _, ranks in told] == [[0], [1], [2], [3], [4, 5]]
    spec, ranks = told[4]
    assert spec.world_size == 6
    assert {sender for rank in ranks for sender in spec.recv_buffers[rank].via_network} == {0, 1}


async def test_each_half_of_the_engines_has_a_connection_if_updated_in_turn() -> None:
    calls = Calls()
    rolling = ["groups.train.devices=4-7", "cluster.devices_per_node=4"]
    rolling += ["rollout={max_staleness: 1, mode: bounded, rolling_update: true}"]
    made = resharder(calls, *rolling)
    await made.connect()
    told = [(request.link, [*request.ranks], request.sync.world_size) for _, request in calls.asked]
    alone = [[0], [1], [2], [3], [4, 5]]
    assert told == [(link, ranks, 6) for link in (0, 1) for ranks in alone]
    assert calls.engines_asked == [0, 1]


def stats(nbytes: int, **seconds: float) -> SyncStats:
    return SyncStats(version=3, nbytes=nbytes, messages=2, peak_staging_bytes=nbytes, seconds=seconds)


async def test_all_ranks_are_told_the_version_and_a_report_has_the_slowest_of_each_stage() -> None:
    sent = [stats(6, pack=1.0, commit=0.5), stats(2, pack=3.0), stats(0), stats(0)]
    received = [[stats(4, load=2.0)], [stats(4, load=1.0, commit=0.7)]]
    calls = Calls(iter([*[None] * 6, *sent, *received]))
    made = resharder(calls)
    await made.connect()
    calls.asked.clear()
    report = await made.sync(3)
    assert calls.asked == [("send_weights", (3, 0))] * 4 + [("receive_weights", 3)] * 2
    assert (report.nbytes, report.messages, report.staging_bytes) == (8, 4, 6)
    assert report.stages == {"pack": 3.0, "commit": 0.7, "load": 2.0}
    metrics = report.metrics()
    assert metrics["sync/load_seconds"] == 2.0
    assert metrics["sync/gb_per_second"] == pytest.approx(8e-9 / metrics["sync/seconds"])


def test_reports_of_engines_updated_in_turn_are_summed() -> None:
    report = SyncReport.of([stats(0, pack=1.0)], [stats(8, load=2.0)], 3.0)
    report.add(SyncReport.of([stats(0, pack=0.5)], [stats(6, load=4.0)], 5.0))
    assert (report.nbytes, report.messages, report.staging_bytes) == (14, 4, 8)
    assert (report.seconds, report.stages) == (8.0, {"pack": 1.5, "load": 6.0})


async def test_an_aborted_sync_names_the_owners_of_the_ranks() -> None:
    aborted = WorkerError("train rank 0 failed in actor.send_weights: sync aborted: rank 7: no room")
    made = resharder(Calls(iter([*[None] * 6, *[aborted] * 6])))
    await made.connect()
    with pytest.raises(WorkerError) as failure:
        await made.sync(3)
    first, second = str(failure.value).splitlines()
    assert first == str(aborted)
    assert "the actor's group, 0 to 3, and from 4 on those of the engines, 2 of each" in second
