"""The operators and kernels of the calls of a profiled process, with their times."""

from __future__ import annotations

import gzip
import json
import math
import time
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from torch.autograd.profiler_util import Interval

from megarl.cluster.kernel_profile import PYTHON, CallProfile, KernelProfiler, by_call
from megarl.cluster.session import Session
from megarl.cluster.step_profiler import StepProfiler
from megarl.cluster.workers import WorkerGroup
from megarl.config import load
from megarl.stages.ppo.config import PPOConfig
from tests.cluster.conftest import DEBUG
from tests.cluster.fakes import FakeStepper

NAMES = {"update.update", "sync.send"}


class Device(Enum):
    CPU = 0
    CUDA = 1


@dataclass
class Event:
    """An event of torch's profiler; times are milliseconds."""

    name: str
    start: int
    end: int
    own: int = 0
    device_type: Device = Device.CPU
    is_user_annotation: bool = False
    is_async: bool = False
    time_range: Interval = field(init=False)

    def __post_init__(self) -> None:
        self.time_range = Interval(1000 * self.start, 1000 * self.end)

    @property
    def self_cpu_time_total(self) -> float:
        return 1000 * self.own


EVENTS = [
    Event("mm", 0, 5, 5),
    Event("sync.send", 200, 210, 10, is_user_annotation=True),
    Event("update.update", 10, 110, 20, is_user_annotation=True),
    Event("linear", 20, 60, 10),
    Event("mm", 25, 55, 30),
    Event("mm", 70, 100, 30),
    Event("update.update", 10, 110, device_type=Device.CUDA, is_user_annotation=True),
    Event("gemm", 30, 70, device_type=Device.CUDA),
    Event("gemm", 72, 90, device_type=Device.CUDA),
    Event("copy", 204, 208, device_type=Device.CUDA),
    Event("gemm", 150, 160, device_type=Device.CUDA),
    Event("prefetch", 20, 90, 70, is_async=True),
]


def milliseconds(profiles: list[CallProfile]) -> list[tuple[str, int, list[tuple[str, int, int]]]]:
    return [
        (
            call.name,
            round(1e3 * call.seconds),
            [(kernel.name, kernel.calls, round(1e3 * kernel.seconds)) for kernel in call.kernels],
        )
        for call in profiles
    ]


@pytest.mark.parametrize(
    ("on_device", "update", "send"),
    [
        (False, [("mm", 2, 60), (PYTHON, 1, 20), ("linear", 1, 10)], [(PYTHON, 1, 10)]),
        (True, [("gemm", 2, 58)], [("copy", 1, 4)]),
    ],
)
def test_operators_by_their_self_time_or_kernels_are_summed_per_call(
    on_device: bool, update: list[Any], send: list[Any]
) -> None:
    profiles = by_call(EVENTS, NAMES, on_device=on_device)
    assert milliseconds(profiles) == [("update.update", 100, update), ("sync.send", 10, send)]


def test_torch_profiler_events_are_assigned_to_calls(tmp_path: Path) -> None:
    profiler = KernelProfiler()
    matrix = torch.eye(64)
    trace = tmp_path / "trace.json.gz"
    with profiler.call("start", "load"):
        _ = matrix @ matrix
    profiler.switch(None)
    _ = matrix @ matrix
    start = time.perf_counter()
    for products in (2, 1):
        with profiler.call("update", "update"):
            for _ in range(products):
                _ = matrix @ matrix
            time.sleep(0.02)
    took = time.perf_counter() - start
    with profiler.call("inference", "values"):
        _ = matrix.exp()
    profiles = {call.name: call for call in profiler.switch(str(trace))}
    assert profiles.keys() == {"update.update", "inference.values"}
    update = {kernel.name: kernel for kernel in profiles["update.update"].kernels}
    assert (update["aten::mm"].calls, update[PYTHON].calls) == (3, 2)
    assert 0.04 <= update[PYTHON].seconds <= profiles["update.update"].seconds <= took
    assert math.isclose(
        sum(kernel.seconds for kernel in update.values()), profiles["update.update"].seconds, rel_tol=0.01
    )
    assert "aten::exp" in {kernel.name for kernel in profiles["inference.values"].kernels}
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert [event["name"] for event in events].count("update.update") == 2
    assert [event["name"] for event in events].count("aten::mm") == 4, "one of no call"


def wait_for_file(path: Path) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.01)


@pytest.mark.process
async def test_engine_steps_are_profiled_under_their_request(session: Session, tmp_path: Path) -> None:
    config = load(DEBUG, ["profile.steps=[1, 2, 3, 4, 5]", "run.steps=5"])
    assert isinstance(config, PPOConfig)
    profiler = StepProfiler(config, session, tmp_path)

    def profiled(step: int) -> dict[str, Any]:
        return json.loads((tmp_path / f"step-{step}.json").read_text())

    process = session.launch("rollout engine 0", partial(FakeStepper, 0.02), [0])
    stepper = WorkerGroup(session, "rollout", [process])
    work = stepper.call(FakeStepper.work, 60)
    async with profiler.step(1):
        await stepper.call(FakeStepper.note, "a")
        time.sleep(0.1)
    steps, note = profiled(1)["rollout engine 0"]
    assert (steps["name"], note["name"]) == ("rollout.work", "update.note")
    (python,) = steps["kernels"]
    assert python["name"] == PYTHON
    assert 0.02 <= 0.02 * python["calls"] <= steps["seconds"]
    trace = gzip.decompress((tmp_path / "step-1-rollout-engine-0.json.gz").read_bytes())
    assert json.loads(trace)["traceEvents"]
    await work
    profiled_step = tmp_path / "step 2"
    starting = stepper.call(FakeStepper.start, partial(wait_for_file, profiled_step))
    async with profiler.step(2):
        assert not starting.finished
        profiled_step.touch()
        await starting
    async with profiler.step(3):
        ray.kill(process.actor)
    async with profiler.step(4):
        session.end(process)
    assert [profiled(step) for step in (2, 3, 4)] == [{}] * 3, "it starts, dies, and is dead"
    process = session.launch("rollout engine 0", partial(FakeStepper, 0.02), [0])
    await WorkerGroup(session, "rollout", [process]).call(FakeStepper.note, "b")
    async with profiler.step(5):
        session.end(process)
    assert profiled(5) == {}, "it was replaced"
