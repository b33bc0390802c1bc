"""Timers on a fake clock."""

from __future__ import annotations

import pytest

from megarl.run.timers import Timers


def test_seconds_are_summed_by_phase_and_reset_when_read() -> None:
    """A phase that fails counts, too; the callback gets the name of each."""
    now = iter([0.0, 2.0, 10.0, 10.5, 20.0, 23.0])
    entered: list[str] = []
    timers = Timers(entered.append, clock=lambda: next(now))
    for phase in ("rollout", "update"):
        with timers(phase):
            pass
    with pytest.raises(RuntimeError, match="stop"), timers("rollout"):
        raise RuntimeError("stop")
    assert entered == ["rollout", "update", "rollout"]
    assert timers.take() == {"time/rollout": 5.0, "time/update": 0.5}
    assert timers.take() == {}
