"""Who has the devices when: what the engines, the trainers and the transfer are asked to do, in order."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.cluster.resharder import SyncReport
from megarl.loop.colocation import Turns

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
