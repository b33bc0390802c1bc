"""Who has the devices when: what the engines, the trainers and the transfer are asked to do, in order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megarl.cluster.resharder import SyncReport
from megarl.loop.colocation import Turns
from megarl.loop.rollout_trainer import Online

REPORT = SyncReport(version=0, nbytes=8, messages=1, staging_bytes=8, seconds=2.0, stages={"offload": 100.0})


class Log:
    """Notes the calls of everything that it stands for."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: object) -> SyncReport:
            self.calls.append(" ".join([name, *map(str, args)]))
            return REPORT

        return call

    def since(self) -> list[str]:
        """The calls since the last look."""
        calls, self.calls = self.calls, []
        return calls


def turns(log: Any, *, sleep: bool) -> Turns:
    return Turns(log, log, log, sleep=sleep)


def test_engines_that_sleep_have_the_devices_to_themselves() -> None:
    log = Log()
    hand = turns(log, sleep=True)
    hand.to_engines(0)
    assert log.since() == ["wake_weights", "sync 0", "rest", "wake_cache"]
    hand.back_to_engines(0)
    assert log.since() == []
    hand.to_trainers()
    hand.to_trainers()
    assert log.since() == ["sleep"]
    hand.back_to_engines(0)
    assert log.since() == ["wake_weights", "sync 0", "rest", "wake_cache"]


def test_engines_that_stay_awake_keep_their_weights_while_trainers_work() -> None:
    log = Log()
    hand = turns(log, sleep=False)
    hand.to_engines(0)
    assert log.since() == ["sync 0", "rest"]
    hand.to_trainers()
    assert log.since() == []
    hand.back_to_engines(0)
    hand.back_to_engines(0)
    assert log.since() == ["rest"]


def test_a_turn_that_has_begun_does_not_begin_again() -> None:
    hand = turns(Log(), sleep=True)
    hand.to_engines(0)
    with pytest.raises(AssertionError, match="the engines' turn already"):
        hand.to_engines(1)


@pytest.mark.parametrize("sleep", [True, False])
def test_making_room_is_a_stage_of_a_sync_and_not_of_its_seconds(sleep: bool) -> None:
    report = turns(Log(), sleep=sleep).to_engines(0)
    assert 100.0 < report.stages["offload"] < 160.0
    assert report.seconds == 2.0
    assert report.metrics()["sync/gb_per_second"] == 4e-9


@pytest.mark.parametrize(("every", "synced"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (5, [5]), (9, [5])])
def test_weights_go_to_the_engines_when_they_are_due_and_after_the_last_step(every: int, synced: list[int]) -> None:
    log, stage = Log(), object.__new__(Online)
    stage._config = SimpleNamespace(rollout=SimpleNamespace(sync_every=every), run=SimpleNamespace(steps=5))
    stage._turns = SimpleNamespace(to_engines=log.sync)
    told = [stage._sync(step) for step in range(1, 6)]
    assert log.since() == [f"sync {step}" for step in synced]
    assert [step for step, metrics in enumerate(told, 1) if metrics] == synced
    assert stage._version == 5, "evaluations and a sync that is repeated are of the last version"
