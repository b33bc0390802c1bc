"""Time limits of calls, on an event loop with simulated time: exactly the overdue process is named."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megarl.cluster import calls, ray_api
from megarl.cluster.calls import Call, CallMonitor, Process, ProcessLostError, WorkerError
from megarl.cluster.ray_worker import Timed
from megarl.config.schema import TimeLimits
from megarl.groups.sync_attempt import SyncAttempt
from megarl.remote import Phase
from tests.loop.simulated_time import SimulatedTime

pytestmark = [
    pytest.mark.filterwarnings("error::RuntimeWarning"),
    pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning"),
]

LIMITS = TimeLimits(**{**dict.fromkeys(TimeLimits.model_fields, 10.0), "rollout": 100.0})


class World:
    """Processes and their calls, whose answer times are known in advance.

    Args:
        latency: an answer is read so long after the process has given it.
    """

    def __init__(self, loop: SimulatedTime) -> None:
        self.loop = loop
        self.latency = 0.0
        self.monitor = CallMonitor(LIMITS)
        self._ends: dict[Any, float] = {}
        self._busy_until: dict[Process[Any], float] = defaultdict(float)

    @property
    def now(self) -> float:
        return self.loop.now

    def run(self, work: Coroutine[Any, Any, object]) -> None:
        """As `Session.run`."""
        self.loop.run_until_complete(self.monitor.run(work))

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
        refs: Any = done
        call = Call[Any](label="call", phase=phase, processes=processes, done=refs, monitor=self.monitor)
        return self.monitor.follow(call)

    def when_done(self, ref: Any, loop: asyncio.AbstractEventLoop, then: Callable[[Future[Any]], object]) -> None:
        """As `ray_api.when_done`."""
        if self._ends[ref] == math.inf:
            return
        answer: Future[Any] = Future()
        answer.set_result(Timed(result=None, seconds=0.0))
        if self.latency:
            loop.call_at(self._ends[ref], loop.call_later, self.latency, then, answer)
        else:
            loop.call_at(self._ends[ref], then, answer)

    def wait(self, refs: Sequence[Any], *, count: int, timeout: float) -> list[Any]:
        """As `ray_api.wait`, for a timeout of 0."""
        assert (count, timeout) == (len(refs), 0)
        return [ref for ref in refs if self._ends[ref] <= self.now]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    told: list[dict[str, Any]] = []
    loop = SimulatedTime()
    loop.set_exception_handler(lambda _loop, context: told.append(context))
    world = World(loop)
    monkeypatch.setattr(calls.ray_api, "when_done", world.when_done)
    monkeypatch.setattr(calls.ray_api, "wait", world.wait)
    yield world
    loop.close()
    assert told == [], "errors of callbacks"


def test_a_call_on_no_process_ends(world: World) -> None:
    """As that which closes engines, when all are still starting."""

    async def work() -> None:
        async with asyncio.timeout(50.0):
            assert await world.call([]) == []
        await world.call(world.processes(1), 1.0)

    world.run(work())


def test_a_hung_process_is_found_while_the_others_keep_answering(world: World) -> None:
    """Each engine has two calls in progress, and gets another for each that ends; one call of p2 never does."""
    engines = world.processes(4, concurrent=True)
    answered = 0

    async def keep_busy(engine: Process[Any]) -> None:
        nonlocal answered
        while True:
            answered += 1
            hangs = engine.name == "p2" and world.now > 30
            await world.call([engine], math.inf if hangs else 2.0 + answered % 3, phase="rollout")

    async def work() -> None:
        await asyncio.wait([world.monitor.spawn(keep_busy(engine)) for engine in [*engines, *engines]])

    with pytest.raises(WorkerError, match=r"^No answer within 100 s from p2 in call\.\n.*time_limits\.rollout"):
        world.run(work())
    assert 130 < world.now < 136
    assert answered > 200


def test_a_hung_process_is_found_despite_an_older_call_with_a_longer_limit(world: World) -> None:
    first, second = world.processes(2)

    async def work() -> None:
        world.call([first], 90.0, phase="rollout")
        await world.call([second], math.inf)

    with pytest.raises(WorkerError, match=r"^No answer within 10 s from p1"):
        world.run(work())
    assert world.now == 10.0


@pytest.mark.parametrize("latency", [0.0, 1.0])
def test_a_driver_that_was_busy_accepts_late_read_answers(world: World, latency: float) -> None:
    """With a latency, the limit of a call ends while its answer waits to be read."""
    (process,) = world.processes(1)
    world.latency = latency

    async def work() -> None:
        calls_in_progress = [world.call([process], 4.0) for _ in range(2)]
        await calls_in_progress[0]
        world.call([process], 9.0)
        world.loop.now += 500.0
        await calls_in_progress[1]

    world.run(work())


def test_a_tolerated_timeout_leaves_other_calls_in_progress(world: World) -> None:
    """Both calls of a hung process fail, each at its own limit."""
    hung, well = world.processes(2, concurrent=True)
    lost: list[tuple[float, str]] = []

    async def note_loss(call: Call[Any]) -> None:
        with pytest.raises(ProcessLostError) as failure:
            await call
        lost.append((world.now, str(failure.value).splitlines()[0]))

    async def work() -> None:
        answers = [world.call([well], 40.0, phase="rollout") for _ in range(2)]
        for start in (0.0, 40.0):
            assert world.now == start
            late = world.call([hung], math.inf, phase="rollout")
            late.survives_loss = True
            world.monitor.spawn(note_loss(late))
            await answers[0]
        await world.call([well], 95.0, phase="rollout")
        await world.call([well], 95.0, phase="rollout")

    world.run(work())
    assert lost == [(end, "No answer within 100 s from p0 in call.") for end in (100.0, 140.0)]


def test_an_overdue_call_that_waits_for_another_process_gets_its_limit_again(world: World) -> None:
    """The calls of two processes wait for a third, which hangs; a fourth answers late but correctly."""
    waiting, other, hung, slow = world.processes(4, concurrent=True)
    late: list[tuple[str, float]] = []

    def tolerate(name: str) -> bool:
        late.append((name, world.now))
        return name != "hung"

    async def work() -> None:
        first = world.call([waiting, other], math.inf, math.inf)
        second, third = world.call([hung], math.inf), world.call([slow], 12.0)
        for name, call in (("waiting", first), ("hung", second), ("slow", third)):
            call.late = lambda _message, name=name: tolerate(name)
        second.survives_loss = True
        await third
        assert late == [("waiting", 10.0), ("hung", 10.0), ("slow", 10.0)]
        assert world.now == 12.0
        with pytest.raises(ProcessLostError):
            await second
        assert world.now == 12.0
        await world.call([slow], 9.0, phase="rollout")
        assert late[3:] == [("waiting", 20.0)]

    world.run(work())


def test_a_limit_begins_again(world: World) -> None:
    """Before it has begun that has no effect; then it comes at the end of the limit, and before that."""
    (process,) = world.processes(1)

    async def work() -> None:
        world.call([process], 9.0)
        long = world.call([process], math.inf)
        for moment in (5.0, 9.0 + 10.0, 28.0):
            world.loop.call_at(moment, long.restart_limit)
        await long

    with pytest.raises(WorkerError, match=r"^No answer within 10 s from p0 in call"):
        world.run(work())
    assert world.now == 38.0


def test_a_call_of_an_earlier_run_keeps_a_limit(world: World) -> None:
    hung, well = world.processes(2)

    async def begin() -> None:
        world.call([hung], math.inf)

    async def go_on() -> None:
        await world.call([well], 99.0, phase="rollout")

    world.run(begin())
    with pytest.raises(WorkerError, match=r"^No answer within 10 s from p0 in call"):
        world.run(go_on())
    assert world.now == 10.0


@pytest.mark.parametrize("seed", range(200))
def test_in_any_schedule_exactly_the_hung_process_is_named(world: World, seed: int) -> None:
    """Calls within their limits, each of some processes, the driver waiting for any of them; then one that hangs."""
    random = np.random.default_rng(seed)
    concurrent, sequential = world.processes(3, concurrent=True), world.processes(4)
    hung = sequential[random.integers(4)]
    busy = math.nan

    async def work() -> None:
        nonlocal busy
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
                await submitted[random.integers(len(submitted))]
        busy = max(world.now, *world._ends.values())
        await world.call([hung], math.inf)

    with pytest.raises(WorkerError, match=f"^No answer within 10 s from {hung.name} in call"):
        world.run(work())
    assert world.now <= busy + 10.0


def test_engines_that_wait_for_busy_trainers_in_a_sync_are_not_overdue(world: World) -> None:
    """Scores of later samples are computed first, with a longer limit than that of a sync."""
    (trainer,) = world.processes(1)
    (engine,) = world.processes(1, concurrent=True)
    engines: Any = SimpleNamespace(spawn=world.monitor.spawn, replaceable=False)
    watch: Any = None

    async def sync(receiving_s: float) -> None:
        world.call([trainer], 95.0, phase="rollout")
        sent, received = world.call([trainer], 4.0, phase="sync"), world.call([engine], receiving_s, phase="sync")
        assert await SyncAttempt(engines, watch, {1: 0}, sent, {0: received}).succeeds()

    async def work() -> None:
        await sync(99.0)
        assert world.now == 99.0
        await sync(math.inf)

    with pytest.raises(WorkerError, match="No answer within 10 s from p0 in call"):
        world.run(work())
    assert world.now == 99.0 + 95.0 + 10.0


def test_what_is_not_there_yet_is_looked_for_again() -> None:
    answers = iter([RuntimeError("not yet"), RuntimeError("not yet"), "there"])

    def find(_: str) -> str:
        answer = next(answers)
        if isinstance(answer, RuntimeError):
            raise answer
        return answer

    assert ray_api.patient(find, 60.0)("a node") == "there"


def test_what_never_comes_is_an_error() -> None:
    def find() -> None:
        raise RuntimeError("not there")

    with pytest.raises(RuntimeError, match="not there"):
        ray_api.patient(find, 0.0)()
