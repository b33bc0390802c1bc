"""Syncs between real processes in which engines die or hang: the others get their weights, and new ones join them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import pytest

from megarl.cluster import session as sessions
from megarl.cluster.calls import CallMonitor, WorkerError
from megarl.cluster.session import Session
from megarl.config import load
from megarl.config.schema import TimeLimits
from megarl.groups.engines import RolloutGroup
from megarl.groups.resharder import Resharder, SyncPlanner
from megarl.groups.sync_attempt import SyncAttempt
from megarl.groups.trainers import RemoteRole, launch_group
from megarl.remote import Phase, RemoteMethod
from megarl.stages.ppo.config import PPOConfig
from tests.cluster.conftest import DEBUG, forget_calls, kill
from tests.cluster.fakes import OPTIONS
from tests.e2e.test_endings import process_that_prints_to
from tests.groups.syncing_workers import Engine, Trainer

pytestmark = pytest.mark.process

SYNC_LIMIT_S = 12.0
DIED = "rollout engine 1 died in rollout.receive_weights."
LATE = f"No answer within {SYNC_LIMIT_S:g} s from rollout engine 1 in rollout.receive_weights."
VALUES = RemoteMethod[Any, [], set[float]](Engine.values, "start")


@dataclass
class Run:
    """Two trainers and two engines."""

    engines: RolloutGroup
    resharder: Resharder
    rolling: Resharder
    faults: Path
    version: int = field(default=0)

    async def sync(self) -> None:
        self.version += 1
        await self.resharder.sync(self.version)

    async def values(self, engine: int) -> set[float]:
        (values,) = await self.engines.call_at(engine, VALUES)
        return values

    async def complete(self) -> None:
        """Waits until both engines have started, and syncs them."""
        await self.engines.until(lambda: self.engines.started == [0, 1])
        await self.sync()
        assert [await self.values(engine) for engine in (0, 1)] == [{self.version}] * 2


@pytest.fixture(scope="module")
def run(session: Session, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    config = load(
        DEBUG,
        [
            "cluster.devices_per_node=4",
            "groups.train.devices=0-1",
            "groups.train.roles={actor: {tp: 1, pp: 2}, critic: {tp: 1, pp: 2}, reference: {tp: 1, pp: 2}}",
            "rollout.devices=2-3",
            "rollout.sleep=false",
            "resharding.bucket_mib=0.05",
        ],
    )
    assert isinstance(config, PPOConfig)
    faults = tmp_path_factory.mktemp("faults")
    worker, engine = Trainer, Engine
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sessions, "_SIGN_OF_LIFE_S", 2.0)
        session.monitor = CallMonitor(TimeLimits(**{**dict.fromkeys(get_args(Phase), 120.0), "sync": SYNC_LIMIT_S}))
        trainers: Any = launch_group(session, config, "train", worker)
        engines = RolloutGroup(session, config.rollout, str(faults), OPTIONS, engine=engine, replacements=12)
        actor = RemoteRole(trainers, "actor", config.layout("actor"))

        resharders: list[Resharder] = []
        for rolling in (False, True):
            rollout = config.rollout.model_copy(update={"rolling_update": rolling})
            resharders.append(Resharder(SyncPlanner(session, config, actor), rollout, actor, engines))
        made = Run(engines, *resharders, faults)

        async def start() -> None:
            await engines.start()
            await made.resharder.connect()

        session.run(start())
        yield made
    kill(trainers, engines)
    forget_calls(session)


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("begin kill", DIED),
        ("load kill", DIED),
        ("commit kill", DIED),
        ("load stop", LATE),
        pytest.param("step stuck", LATE, marks=pytest.mark.matrix),
    ],
)
async def test_the_surviving_engine_is_synced_and_a_new_one_joins(run: Run, fault: str, cause: str) -> None:
    await run.complete()
    before = len(run.engines.replaced)
    (run.faults / "1").write_text(fault)
    if fault.startswith("step"):
        await run.values(1)  # a step follows each call
    await run.sync()
    assert await run.values(0) == {run.version}
    assert [each.splitlines()[0] for each in run.engines.replaced[before:]] == [cause]
    await run.complete()


async def test_an_engine_that_dies_after_its_weights_arrived_is_replaced(run: Run) -> None:
    await run.complete()
    os.kill(process_that_prints_to(run.engines.processes[1].log_file), signal.SIGKILL)
    assert len(await run.engines.take_usage()) == 1
    assert run.engines.replaced[-1].splitlines()[0] == "rollout engine 1 died in rollout.usage."
    await run.complete()


@pytest.mark.parametrize("reconnects", [False, True])
async def test_an_engine_that_dies_in_another_call_is_left_out(
    run: Run, monkeypatch: pytest.MonkeyPatch, reconnects: bool
) -> None:
    """It has answered the sync's own call, be that of the transfer or of the connection before."""
    await run.complete()

    def replace() -> None:
        run.engines.replace(1, run.engines.processes[1], "rollout engine 1 died in rollout.generate.")

    async def succeed_and_lose(attempt: SyncAttempt) -> bool:
        monkeypatch.undo()
        succeeded = await attempt.succeeds()
        replace()
        return succeeded

    if reconnects:
        replace()
        await run.engines.until(lambda: run.engines.started == [0, 1])
    monkeypatch.setattr(SyncAttempt, "succeeds", succeed_and_lose)
    await run.sync()
    assert await run.values(0) == {run.version}
    await run.complete()


@pytest.mark.matrix
async def test_consecutive_engine_deaths_end_with_two_new_engines(run: Run) -> None:
    await run.complete()
    before = len(run.engines.replaced)
    (run.faults / "0").write_text("load kill")
    (run.faults / "1").write_text("connect kill")
    await run.sync()
    labels = [each.splitlines()[0].rpartition(" ")[2] for each in run.engines.replaced[before:]]
    assert labels == ["rollout.receive_weights.", "rollout.connect."]
    await run.complete()


async def test_engines_updated_in_turn_do_not_wait_for_each_other(run: Run) -> None:
    await run.complete()
    together = run.resharder
    run.resharder = run.rolling
    await run.complete()
    (run.faults / "1").write_text("load kill")
    await run.sync()
    assert await run.values(0) == {run.version}
    await run.complete()
    run.resharder = together


def test_replacements_are_limited(session: Session, run: Run) -> None:
    """The last test: the run is over."""
    session.run(run.complete())
    limit = len(run.engines.replaced)
    run.engines._replacements = limit
    (run.faults / "0").write_text("begin kill")
    message = rf"(?s)engine 0 died in rollout\.receive_weights.*max_replacements = {limit} is"
    with pytest.raises(WorkerError, match=message):
        session.run(run.sync())
