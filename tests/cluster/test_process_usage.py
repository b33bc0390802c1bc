"""Time and memory of a process by phase."""

from __future__ import annotations

import time

import numpy as np
import pytest

from megarl.cluster.process_usage import UsageMeter
from megarl.cluster.workers import WorkerGroup
from tests.cluster.fakes import FakeWorker

SIZE = 300 << 20


def test_a_phase_has_its_peak_memory() -> None:
    meter = UsageMeter()
    meter.enter("inference")
    before = meter.take().peak_bytes
    assert before.keys() == {"start", "inference"}
    meter.enter("update")
    held = np.ones(SIZE, dtype=np.uint8)
    del held
    meter.enter("sync")
    meter.enter("update")
    peaks = meter.take().peak_bytes
    assert peaks["update"] - peaks["inference"] == pytest.approx(SIZE, rel=0.03)
    assert peaks["sync"] == pytest.approx(peaks["inference"], abs=SIZE / 20)
    assert meter.take().peak_bytes.keys() == {"update"}


def test_time_between_calls_is_idle() -> None:
    meter = UsageMeter()
    meter.take()
    time.sleep(0.2)
    meter.add(0.1)
    assert 0.5 <= meter.take().idle < 0.9
    meter.add(1e9)
    assert meter.take().idle == 0


@pytest.mark.process
async def test_a_group_reports_the_usage_of_its_processes(group: WorkerGroup[FakeWorker]) -> None:
    await group.call(FakeWorker.noted)
    await group.take_usage()
    await group.call(FakeWorker.note, "sleeps", 0.5)
    used = await group.take_usage()
    assert len(used) == 3
    assert all(usage.peak_bytes["update"] > 10 << 20 for usage in used)
    assert all(usage.idle < 0.5 and not usage.device_name for usage in used)
    time.sleep(0.1)
    assert all(usage.idle == 1 for usage in await group.take_usage())
