"""Timers on a clock of the test's own."""

from __future__ import annotations

import pytest

from megarl.run.timers import Timers


def test_seconds_are_summed_by_stage_and_reset_when_read() -> None:
    now = iter([0.0, 2.0, 10.0, 10.5, 20.0, 23.0])
    timers = Timers(clock=lambda: next(now))
    for stage in ("rollout", "update", "rollout"):
        with timers(stage):
            pass
    assert timers.take() == {"time/rollout": 5.0, "time/update": 0.5}
    assert timers.take() == {}


def test_a_stage_that_fails_is_counted_and_fails() -> None:
    now = iter([1.0, 4.0])
    timers = Timers(clock=lambda: next(now))
    with pytest.raises(RuntimeError, match="stop"), timers("sync"):
        raise RuntimeError("stop")
    assert timers.take() == {"time/sync": 3.0}


def test_a_callback_gets_the_name_of_each_phase() -> None:
    told: list[str] = []
    timers = Timers(told.append)
    with timers("step"), timers("rollout"):
        assert told == ["step", "rollout"]
