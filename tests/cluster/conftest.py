"""One Ray cluster, with its temporary directory, for all tests of this folder; `async def` tests run in its loop."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from megarl.cluster.calls import CallMonitor
from megarl.cluster.session import Session
from megarl.cluster.workers import WorkerGroup
from megarl.config import RunConfig, load
from megarl.config.schema import TimeLimits
from megarl.groups.trainers import launch_group
from tests.cluster.fakes import FakeWorker

MakeGroup = Callable[[], WorkerGroup[FakeWorker]]
DEBUG = Path(__file__).parents[2] / "configs" / "debug" / "ppo.yaml"
ROLES = "groups.train.roles"
TWO = ("cluster.devices_per_node=2", "groups.train.devices=0-1", f"{ROLES}.actor={{tp: 2, pp: 1}}")
"""Overrides for two processes."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs an `async def` test within `Session.run` of its session fixture, or in a plain loop if it has none."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    arguments: dict[str, Any] = {name: pyfuncitem.funcargs[name] for name in names}
    test = pyfuncitem.obj(**arguments)
    sessions = [fixture for fixture in pyfuncitem.funcargs.values() if isinstance(fixture, Session)]
    if sessions:
        sessions[0].run(test)
    else:
        asyncio.run(test)
    return True


@pytest.fixture(scope="package")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    with Session(load(DEBUG).cluster, tmp_path_factory.mktemp("logs")) as running:
        yield running


@pytest.fixture(scope="session")
def config() -> RunConfig:
    """Three devices, of which an engine shares one."""
    return load(
        DEBUG,
        [
            "cluster.devices_per_node=4",
            "groups.train.devices=0-2",
            "groups.train.roles.actor={tp: 1, pp: 1}",
            "groups.train.roles.critic={tp: 1, pp: 1}",
            "groups.train.roles.reference={tp: 1, pp: 1}",
            "rollout.devices=2-3",
        ],
    )


@pytest.fixture(scope="module")
def group(session: Session, config: RunConfig) -> Iterator[WorkerGroup[FakeWorker]]:
    """Three fake workers for tests that do not break them."""
    workers = launch_group(session, config, "train", FakeWorker)
    yield workers
    kill(workers)


@pytest.fixture
def make_group(session: Session, config: RunConfig) -> Iterator[MakeGroup]:
    """Makes fake workers for a test that breaks them."""
    made: list[WorkerGroup[FakeWorker]] = []

    def make() -> WorkerGroup[FakeWorker]:
        made.append(launch_group(session, config, "train", FakeWorker))
        return made[-1]

    yield make
    kill(*made)
    forget_calls(session)


async def answer_of[T](make: Callable[[], Awaitable[T]]) -> T:
    """Makes a call, or what consists of calls, and waits for it: for tests outside the loop, which expect failures."""
    return await make()


@pytest.fixture
def drop_broken_calls(session: Session) -> Iterator[None]:
    """Drops the calls that a test breaks, as a run's end would."""
    yield
    forget_calls(session)


def forget_calls(session: Session) -> None:
    """Gives a session a new monitor, which knows no call that failed or ended with its process."""
    session.monitor = CallMonitor(TimeLimits())


def kill(*groups: WorkerGroup[Any]) -> None:
    for group in groups:
        for process in group.processes:
            ray.kill(process.actor)
