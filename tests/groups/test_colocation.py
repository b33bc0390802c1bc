"""Device handover: the calls of engines, trainers and resharder, in order."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.cluster.process_usage import ProcessUsage
from megarl.groups.colocation import Colocation
from megarl.groups.engine_load import EngineLoad
from megarl.groups.engines import RolloutGroup
from megarl.groups.resharder import SyncReport
from megarl.loop.rollout_trainer import RolloutTrainer

REPORT = SyncReport(nbytes=8, messages=1, staging_bytes=8, seconds=2.0, stages={"offload": 100.0})


class Log:
    """Records the calls of all objects that it replaces; each of them is awaited."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any) -> Any:
            if name == "call":
                self.calls.append(args[0].name)
                return None
            self.calls.append(" ".join([name, *map(str, args)]))
            return replace(REPORT, stages=dict(REPORT.stages))

        return call

    def new_calls(self) -> list[str]:
        """The calls since the last reading."""
        calls, self.calls = self.calls, []
        return calls


async def test_sleeping_engines_alternate_with_trainers() -> None:
    log: Any = Log()
    devices = Colocation(log, log, log, sleep=True)
    await devices.sync(3)
    assert log.new_calls() == ["wake_weights", "sync 3", "offload_all", "wake_cache"]
    await devices.to_rollout()
    assert log.new_calls() == []
    await devices.to_training()
    await devices.to_training()
    assert log.new_calls() == ["sleep"]
    await devices.to_rollout()
    assert log.new_calls() == ["wake_weights", "sync 3", "offload_all", "wake_cache"], "the version of the last sync"
    await devices.to_training()
    await devices.sync()
    assert log.new_calls() == ["sleep", "wake_weights", "sync 3", "offload_all", "wake_cache"]


async def test_awake_engines_keep_their_weights_while_trainers_work() -> None:
    log: Any = Log()
    devices = Colocation(log, log, log, sleep=False)
    await devices.sync(0)
    assert log.new_calls() == ["sync 0", "offload_all"]
    await devices.to_training()
    assert log.new_calls() == []
    await devices.to_rollout()
    await devices.to_rollout()
    assert log.new_calls() == ["offload_all"]


@pytest.mark.parametrize(
    ("sleep", "calls"), [(True, ["offload_all", "wake_weights", "wake_cache", "sleep"]), (False, ["offload_all"])]
)
async def test_engines_that_load_files_get_no_weights_from_trainers(sleep: bool, calls: list[str]) -> None:
    log: Any = Log()
    devices = Colocation(log, log, None, sleep=sleep)
    await devices.to_rollout()
    await devices.to_rollout()
    await devices.to_training()
    assert log.new_calls() == calls


async def test_engines_on_separate_devices_get_weights_at_any_time() -> None:
    log: Any = Log()
    devices = Colocation(log, log, log, sleep=False, shared=False)
    await devices.sync(0)
    await devices.to_training()
    await devices.sync(1)
    await devices.sync(2)
    await devices.to_rollout()
    assert log.new_calls() == ["sync 0", "sync 1", "sync 2"]


async def test_engines_that_hold_the_devices_get_no_weights() -> None:
    log: Any = Log()
    devices = Colocation(log, log, log, sleep=True)
    await devices.sync(0)
    with pytest.raises(AssertionError, match="the engines have the devices already"):
        await devices.sync(1)


@pytest.mark.parametrize("sleep", [True, False])
async def test_offloading_is_timed_separately_from_the_sync(sleep: bool) -> None:
    log: Any = Log()
    report = await Colocation(log, log, log, sleep=sleep).sync(0)
    assert 100.0 < report.stages["offload"] < 160.0
    assert report.seconds == 2.0
    assert report.metrics()["sync/gb_per_second"] == 4e-9


@pytest.mark.parametrize(
    ("every", "evaluated", "synced"),
    [
        (1, None, [1, 2, 3, 4, 5]),
        (2, None, [2, 4, 5]),
        (5, None, [5]),
        (9, None, [5]),
        (9, 2, [2, 4, 5]),
        (2, 3, [2, 3, 4, 5]),
    ],
)
async def test_weights_are_synced_when_due_before_evaluations_and_after_the_last_step(
    every: int, evaluated: int | None, synced: list[int]
) -> None:
    log = Log()
    trainer: Any = object.__new__(RolloutTrainer)
    trainer._config = SimpleNamespace(rollout=SimpleNamespace(sync_every=every), steps=5)
    trainer._colocation = SimpleNamespace(sync=log.sync)
    trainer._buffer = SimpleNamespace(
        skips_sync=lambda _: False,
        prepare_sync=log.prepare,
        synced=lambda step: log.calls.append(f"synced {step}"),
    )

    async def take_usage() -> list[ProcessUsage]:
        return [ProcessUsage(idle=0.0, peak_bytes={"rollout": 2**30}, device_name="")]

    trainer._engines = SimpleNamespace(name="rollout", take_usage=take_usage)
    trainer.evaluate_every = evaluated
    metrics = [await trainer._sync(step) for step in range(1, 6)]
    assert log.new_calls() == [call for step in synced for call in ("prepare", f"sync {step}", f"synced {step}")]
    assert [step for step, of_step in enumerate(metrics, 1) if of_step] == synced
    assert all(of_step["memory/rollout/rollout"] == 1.0 for of_step in metrics if of_step)


async def test_the_first_step_does_not_count_the_start_of_the_engines() -> None:
    engines: Any = object.__new__(RolloutGroup)
    engines._load = EngineLoad(1)
    engines._load._read -= 1000.0
    engines._change = asyncio.Event()
    trainer: Any = object.__new__(RolloutTrainer)
    trainer._config = SimpleNamespace(resharding=SimpleNamespace(logprob_check=None))
    trainer._phase, trainer._engines = (lambda _name: None), engines
    trainer._colocation = Log()
    trainer._buffer = SimpleNamespace(begin=lambda _step: engines._count(0, 1))
    await trainer.begin(0)
    time.sleep(0.2)
    assert engines.take_metrics()["rollout/engine_idle"] < 0.5
