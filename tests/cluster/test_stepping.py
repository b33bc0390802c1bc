"""A process that works in steps answers calls between them, and reports failures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import ray

from megarl.cluster.calls import CallMonitor, WorkerError
from megarl.cluster.session import Session
from megarl.cluster.workers import WorkerGroup
from megarl.config.schema import TimeLimits
from megarl.remote import RemoteMethod
from tests.cluster.fakes import FakeStepper

pytestmark = pytest.mark.process

Stepper = WorkerGroup[FakeStepper]
MakeStepper = Callable[[float], Stepper]


@pytest.fixture
def make(session: Session) -> Iterator[MakeStepper]:
    """Makes a process whose steps take so many seconds."""
    made: list[Stepper] = []

    def stepper(step_s: float) -> Stepper:
        process = session.launch_stepping("stepper", [0], FakeStepper, step_s)
        made.append(WorkerGroup(session, "fake", [process]))
        made[-1].call(FakeStepper.noted).wait()
        return made[-1]

    yield stepper
    for process in (process for group in made for process in group.processes):
        ray.kill(process.actor)
    session.monitor = CallMonitor(TimeLimits())


def test_calls_are_answered_between_two_steps_in_their_order(make: MakeStepper) -> None:
    stepper = make(0.05)
    work = stepper.call(FakeStepper.work, 60)
    notes = [stepper.call(FakeStepper.note, name) for name in "abc"]
    (first,), (second,), (third,) = (note.wait() for note in notes)
    assert first <= second <= third < 30, "they have waited for the work"
    assert not work.finished
    assert stepper.call(FakeStepper.noted).wait() == [["a", "b", "c"]]
    (steps,) = work.wait()
    assert steps >= 60
    assert work.longest() > 60 * 0.05


def test_calls_that_ray_swaps_run_in_the_drivers_order(make: MakeStepper) -> None:
    stepper = make(0.0)
    process = stepper.processes[0]
    first, second = next(process.numbers), next(process.numbers)
    sent = (("b", second), ("a", first))
    swapped = [process.actor.run.remote("note", (name,), {}, None, "start", number) for name, number in sent]
    ray.get(swapped, timeout=60)
    assert stepper.call(FakeStepper.noted).wait() == [["a", "b"]]


def test_a_call_ends_independently_of_others(make: MakeStepper) -> None:
    stepper = make(0.02)
    long, short = (stepper.call(FakeStepper.work, units) for units in (100, 3))
    (soon,) = short.wait()
    assert not long.finished
    (late,) = long.wait()
    assert late - soon > 90


def test_without_work_there_are_no_steps(make: MakeStepper) -> None:
    stepper = make(0.0)
    stepper.call(FakeStepper.work, 5).wait()
    (before,) = stepper.call(FakeStepper.note, "before").wait()
    time.sleep(0.5)
    (after,) = stepper.call(FakeStepper.note, "after").wait()
    assert after - before <= 1, "a step follows a call, which may have brought work"


@pytest.mark.parametrize("method", [FakeStepper.fail, FakeStepper.fail_later], ids=["method", "future"])
def test_a_failed_call_is_named_and_leaves_the_others_alone(
    make: MakeStepper, session: Session, method: RemoteMethod[FakeStepper, [], object]
) -> None:
    stepper = make(0.05)
    work = stepper.call(FakeStepper.work, 100)
    cause = r"(?s)^stepper failed in fake\.fail\w*: ArithmeticError\('the work is a teapot'\).*fakes\.py"
    with pytest.raises(WorkerError, match=cause):
        stepper.call(method).wait()
    (steps,) = work.wait()
    assert steps >= 100
    session.monitor = CallMonitor(TimeLimits())
    assert stepper.call(FakeStepper.noted).wait() == [[]]


def test_an_error_in_a_step_ends_the_process_and_fails_every_call(make: MakeStepper) -> None:
    stepper = make(0.02)
    work = stepper.call(FakeStepper.work, 10**6)
    start = time.monotonic()
    stepper.call(FakeStepper.break_steps)
    with pytest.raises(WorkerError) as failure:
        work.wait()
    assert time.monotonic() - start < 60
    text = str(failure.value)
    assert text.startswith("stepper died in fake.")
    assert "sleep length must be non-negative" in text, "the error is in the log"
