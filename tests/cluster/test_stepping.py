"""A process that works in steps answers calls between them, and reports failures."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import pytest
import ray

from megarl.cluster.calls import Call, WorkerError
from megarl.cluster.session import Session
from megarl.cluster.workers import WorkerGroup
from megarl.remote import RemoteMethod
from tests.cluster.conftest import answer_of, forget_calls, kill
from tests.cluster.fakes import FakeStepper

pytestmark = pytest.mark.process

Stepper = WorkerGroup[FakeStepper]
MakeStepper = Callable[[float], Awaitable[Stepper]]


@pytest.fixture
def make(session: Session) -> Iterator[MakeStepper]:
    """Makes a process whose steps take so many seconds."""
    made: list[Stepper] = []

    async def stepper(step_s: float) -> Stepper:
        process = session.launch("stepper", partial(FakeStepper, step_s), [0])
        made.append(WorkerGroup(session, "fake", [process]))
        await made[-1].call(FakeStepper.noted)
        return made[-1]

    yield stepper
    kill(*made)
    forget_calls(session)


async def test_calls_are_answered_between_two_steps_in_their_order(make: MakeStepper) -> None:
    stepper = await make(0.05)
    work = stepper.call(FakeStepper.work, 60)
    notes = [stepper.call(FakeStepper.note, name) for name in "abc"]
    (first,), (second,), (third,) = [await note for note in notes]
    assert first <= second <= third < 30, "they have waited for the work"
    assert not work.finished
    assert await stepper.call(FakeStepper.noted) == [["a", "b", "c"]]
    (steps,) = await work
    assert steps >= 60
    assert await work.longest() > 60 * 0.05


async def test_calls_that_ray_swaps_run_in_the_drivers_order(make: MakeStepper) -> None:
    stepper = await make(0.0)
    process = stepper.processes[0]
    first, second = next(process.numbers), next(process.numbers)
    sent = (("b", second), ("a", first))
    swapped = [process.actor.run.remote("note", (name,), {}, None, "start", number) for name, number in sent]
    ray.get(swapped, timeout=60)
    assert await stepper.call(FakeStepper.noted) == [["a", "b"]]


async def test_a_call_ends_independently_of_others(make: MakeStepper) -> None:
    stepper = await make(0.02)
    long, short = (stepper.call(FakeStepper.work, units) for units in (100, 3))
    (soon,) = await short
    assert not long.finished
    (late,) = await long
    assert late - soon > 90


async def test_without_work_there_are_no_steps(make: MakeStepper) -> None:
    stepper = await make(0.0)
    await stepper.call(FakeStepper.work, 5)
    (before,) = await stepper.call(FakeStepper.note, "before")
    time.sleep(0.5)
    (after,) = await stepper.call(FakeStepper.note, "after")
    assert after - before <= 1, "a step follows a call, which may have brought work"


@pytest.mark.parametrize("method", [FakeStepper.fail, FakeStepper.fail_later], ids=["method", "future"])
def test_a_failed_call_is_named_and_leaves_the_others_alone(
    make: MakeStepper, session: Session, method: RemoteMethod[FakeStepper, [], object]
) -> None:
    stepper = session.run(answer_of(lambda: make(0.05)))
    works: list[Call[Any]] = []

    async def fail() -> None:
        works.append(stepper.call(FakeStepper.work, 100))
        await stepper.call(method)

    cause = r"(?s)^stepper failed in fake\.fail\w*: ArithmeticError\('the work is a teapot'\).*fakes\.py"
    with pytest.raises(WorkerError, match=cause):
        session.run(fail())
    (work,) = works
    assert ray.get(work.done[0]).result >= 100
    forget_calls(session)
    assert session.run(answer_of(lambda: stepper.call(FakeStepper.noted))) == [[]]


def test_an_error_in_a_step_ends_the_process_and_fails_every_call(make: MakeStepper, session: Session) -> None:
    stepper = session.run(answer_of(lambda: make(0.02)))

    async def break_steps() -> None:
        work = stepper.call(FakeStepper.work, 10**6)
        stepper.call(FakeStepper.break_steps)
        await work

    start = time.monotonic()
    with pytest.raises(WorkerError) as failure:
        session.run(break_steps())
    assert time.monotonic() - start < 60
    text = str(failure.value)
    assert text.startswith("stepper died in fake.")
    assert "sleep length must be non-negative" in text, "the error is in the log"
