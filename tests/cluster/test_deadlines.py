"""Time limits of calls, on a clock that the test moves: exactly the overdue process is named."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megarl.cluster import calls
from megarl.cluster.calls import Call, CallMonitor, Process, WorkerError
from megarl.cluster.ray_worker import Timed
from megarl.config.schema import TimeLimits
from megarl.groups.sync_attempt import SyncAttempt
from megarl.remote import Phase

LIMITS = TimeLimits(**{**dict.fromkeys(TimeLimits.model_fields, 10.0), "rollout": 100.0})


class World:
    """Processes and their calls, whose answer times are known in advance."""

    def __init__(self) -> None:
        self.now = 0.0
        self.monitor = CallMonitor(LIMITS)
        self._ends: dict[Any, float] = {}
        self._busy_until: dict[Process[Any], float] = defaultdict(float)

    def processes(self, count: int, *, concurrent: bool = False) -> list[Process[Any]]:
        return [
            Process(name=f"p{index}", actor=None, log_file=Path("/nowhere"), concurrent=concurrent)
            for index in range(count)
        ]

    def call(
        self,
        processes: Sequence[Process[Any]],
        *seconds: float,
        phase: Phase = "update",
        together: bool = False,
        then: Callable[[], object] | None = None,
    ) -> Call[Any]:
        """Submits a call that takes so long on each process.

        Args:
            together: none begins before all can.
        """
        starts = [self.now if each.concurrent else max(self.now, self._busy_until[each]) for each in processes]
        starts = [max(starts)] * len(starts) if together else starts
        done = [object() for _ in processes]
        for process, ref, start, took in zip(processes, done, starts, seconds, strict=True):
            self._ends[ref] = self._busy_until[process] = start + took
        call = Call[Any](label="call", phase=phase, processes=processes, done=done, monitor=self.monitor, then=then)
        return self.monitor.follow(call)

    def wait(self, refs: Sequence[Any], *, count: int, timeout: float) -> list[Any]:
        """As `ray_api.wait`, for a count of one or a timeout of 0."""
        self.now = max(self.now, min(self.now + timeout, min(self._ends[ref] for ref in refs)))
        return [ref for ref in refs if self._ends[ref] <= self.now]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(calls, "time", SimpleNamespace(monotonic=lambda: world.now))
    monkeypatch.setattr(calls.ray_api, "wait", world.wait)
    monkeypatch.setattr(calls.ray_api, "get", lambda _ref: Timed(result=None, seconds=0.0))
    return world


def test_a_hung_process_is_found_while_the_others_keep_answering(world: World) -> None:
    """Each engine has two calls in progress, and gets another for each that ends; one call of p2 never does."""
    engines = world.processes(4, concurrent=True)
    answered = 0

    def go_on(engine: Process[Any]) -> None:
        nonlocal answered
        answered += 1
        hangs = engine.name == "p2" and world.now > 30
        world.call([engine], math.inf if hangs else 2.0 + answered % 3, phase="rollout", then=lambda: go_on(engine))

    for engine in [*engines, *engines]:
        go_on(engine)
    with pytest.raises(WorkerError, match=r"^No answer within 100 s from p2 in call\.\n.*time_limits\.rollout"):
        world.monitor.wait_until(SimpleNamespace(finished=False))
    assert 130 < world.now < 136
    assert answered > 200


def test_a_hung_process_is_found_despite_an_older_call_with_a_longer_limit(world: World) -> None:
    first, second = world.processes(2)
    world.call([first], 90.0, phase="rollout")
    late = world.call([second], math.inf)
    with pytest.raises(WorkerError, match=r"^No answer within 10 s from p1"):
        late.wait()
    assert world.now == 10.0


def test_a_queued_call_has_its_full_limit_after_the_earlier_ones(world: World) -> None:
    processes = world.processes(2)
    queue = [world.call(processes, 9.0, 1.0) for _ in range(7)]
    queue[-1].wait()
    assert world.now == 63.0
    late = [world.call(processes, 9.0, 1.0), world.call(processes, 9.0, math.inf)]
    with pytest.raises(WorkerError, match=r"^No answer within 10 s from p1 in call"):
        late[1].wait()
    assert world.now == 63.0 + 9.0 + 10.0


def test_processes_that_wait_for_a_busy_peer_are_not_overdue(world: World) -> None:
    """One is in a call of its own for up to a long limit; the others wait for it in a call of a short one."""
    processes = world.processes(3)
    world.call(processes[:1], 95.0, phase="rollout")
    together = world.call(processes, 8.0, 8.0, 8.0, together=True)
    together.wait()
    assert world.now == 103.0


def test_a_driver_that_was_busy_accepts_late_read_answers(world: World) -> None:
    (process,) = world.processes(1)
    calls_in_progress = [world.call([process], 4.0) for _ in range(2)]
    calls_in_progress[0].wait()
    world.call([process], 9.0)
    world.now += 500.0
    calls_in_progress[1].wait()


def test_a_tolerated_timeout_leaves_other_calls_in_progress(world: World) -> None:
    """Both calls of a hung process fail, each at its own limit."""
    hung, well = world.processes(2, concurrent=True)
    lost: list[tuple[float, str]] = []
    answers = [world.call([well], 40.0, phase="rollout") for _ in range(2)]
    for start in (0.0, 40.0):
        world.now = start
        late = world.call([hung], math.inf, phase="rollout")
        late.lost = lambda cause: lost.append((world.now, cause.splitlines()[0]))
        answers[0].wait()
    world.call([well], 95.0, phase="rollout").wait()
    world.call([well], 95.0, phase="rollout").wait()
    assert lost == [(end, "No answer within 100 s from p0 in call.") for end in (100.0, 140.0)]


def test_an_overdue_call_that_waits_for_another_process_gets_its_limit_again(world: World) -> None:
    """The calls of two processes wait for a third, which hangs; a fourth answers late but correctly."""
    waiting, other, hung, slow = world.processes(4, concurrent=True)
    late: list[tuple[str, float]] = []

    def tolerate(name: str) -> bool:
        late.append((name, world.now))
        return name != "hung"

    first = world.call([waiting, other], math.inf, math.inf)
    second, third = world.call([hung], math.inf), world.call([slow], 12.0)
    for name, call in (("waiting", first), ("hung", second), ("slow", third)):
        call.late = lambda _message, name=name: tolerate(name)
    lost: list[str] = []
    second.lost = lost.append
    third.wait()
    assert late == [("waiting", 10.0), ("hung", 10.0), ("slow", 10.0)]
    assert world.now == 12.0
    assert len(lost) == 1
    world.call([slow], 9.0, phase="rollout").wait()
    assert late[3:] == [("waiting", 20.0)]


@pytest.mark.parametrize("seed", range(200))
def test_in_any_schedule_exactly_the_hung_process_is_named(world: World, seed: int) -> None:
    """Calls within their limits, each of some processes, the driver waiting for any of them; then one that hangs."""
    random = np.random.default_rng(seed)
    concurrent, sequential = world.processes(3, concurrent=True), world.processes(4)
    submitted: list[Call[Any]] = []
    for _ in range(40):
        group = concurrent if random.random() < 0.4 else sequential
        chosen = [
            group[i] for i in sorted(random.choice(len(group), random.integers(1, len(group) + 1), replace=False))
        ]
        phase: Phase = "rollout" if random.random() < 0.3 else "sync"
        seconds = random.uniform(0, getattr(LIMITS, phase), len(chosen))
        submitted.append(world.call(chosen, *seconds, phase=phase, together=random.random() < 0.5))
        if random.random() < 0.3:
            submitted[random.integers(len(submitted))].wait()
    busy = max(world.now, *world._ends.values())
    hung = sequential[random.integers(4)]
    late = world.call([hung], math.inf)
    with pytest.raises(WorkerError, match=f"^No answer within 10 s from {hung.name} in call"):
        late.wait()
    assert world.now <= busy + 10.0


def test_engines_that_wait_for_busy_trainers_in_a_sync_are_not_overdue(world: World) -> None:
    """Scores of later samples are computed first, with a longer limit than that of a sync."""
    (trainer,) = world.processes(1)
    (engine,) = world.processes(1, concurrent=True)
    world.call([trainer], 95.0, phase="rollout")
    sent, received = world.call([trainer], 4.0, phase="sync"), world.call([engine], 99.0, phase="sync")
    engines: Any = SimpleNamespace(monitor=world.monitor, replaceable=False)
    watch: Any = None
    assert SyncAttempt(engines, watch, {1: 0}, sent, {0: received}).succeeds()
    world.call([trainer], 95.0, phase="rollout")
    sent, received = world.call([trainer], 4.0, phase="sync"), world.call([engine], math.inf, phase="sync")
    with pytest.raises(WorkerError, match="No answer within 10 s from p0 in call"):
        SyncAttempt(engines, watch, {1: 0}, sent, {0: received}).succeeds()
    assert world.now == 99.0 + 95.0 + 10.0
