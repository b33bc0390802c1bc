"""Calls on real processes: order, references, and failures that are raised immediately with their cause."""

from __future__ import annotations

import importlib.util
import os
import re
import threading
import time
from collections.abc import Iterator
from typing import get_args

import pytest

from megarl.cluster.calls import CallMonitor, WorkerError
from megarl.cluster.session import Session
from megarl.cluster.workers import WorkerGroup
from megarl.config.schema import TimeLimits
from megarl.errors import RunError
from megarl.remote import Phase, RemoteMethod
from tests.cluster.conftest import MakeGroup, answer_of, forget_calls
from tests.cluster.fakes import FakeWorker

Group = WorkerGroup[FakeWorker]

pytestmark = pytest.mark.process


async def test_calls_return_at_once_and_run_in_the_order_of_submission(group: Group) -> None:
    await group.call(FakeWorker.note, "first")
    start = time.perf_counter()
    slow = group.call(FakeWorker.note, "slow", 3.0)
    group.call(FakeWorker.note, "quick")
    submitted = time.perf_counter() - start
    orders = await group.call(FakeWorker.noted)
    assert orders == [["first", "slow", "quick"]] * 3
    assert await slow == [0, 1, 2]
    assert submitted < 3.0
    assert 3.0 <= await slow.longest() < time.perf_counter() - start, (
        "the time of the ranks, the wait for a turn not included"
    )


async def test_another_thread_is_told_the_calls_in_progress_and_their_time(group: Group) -> None:
    slow = group.call(FakeWorker.note, "slow", 2.0)
    later = group.call(FakeWorker.noted)
    told: list[str] = []
    asking = threading.Timer(0.7, lambda: told.extend(slow.monitor.in_progress()))
    asking.start()
    await later
    asking.join()
    first, second = told
    assert re.fullmatch(r"train rank 0, train rank 1, train rank 2 in train.note: [12] of \d+ s", first), first
    assert second == "train rank 0, train rank 1, train rank 2 in train.noted: its limit has not begun"


async def test_a_column_comes_back_by_chunk_from_the_ranks_that_report_it(group: Group) -> None:
    reporters = {0: [], 1: [0, 3], 2: [1, 2]}
    call = group.submit(FakeWorker.column, [(reporters,), (reporters,), (reporters,)], chunks=[(), (0, 3), (1, 2)])
    assert await call == ["by 0", "by 1", "by 2"], "a reporting rank without chunks returns its result, too"
    assert await call.longest() > 0
    assert [int(call.chunks[chunk][0]) for chunk in range(len(call.chunks))] == [0, 1, 2, 3]
    assert not call.chunks[0].flags.owndata, "the chunk is not mapped from the object store"
    assert not call.chunks[0].flags.writeable
    call = group.submit(FakeWorker.column, [({},)] * 3, chunks=[()] * 3)
    assert await call == [None] * 3


async def test_workers_read_columns_by_reference_before_the_driver_waits(group: Group) -> None:
    column = group.submit(FakeWorker.column, [({0: [0, 1, 2]},)] * 3, chunks=[(0, 1, 2), (), ()]).chunks
    means = group.call(FakeWorker.means, column, [2, 0])
    assert await means == [[2.0, 0.0]] * 3
    assert not column._fetched, "the driver has fetched a chunk"


async def test_a_process_on_a_virtual_device_has_one_thread_and_neither_gpus_nor_wandb(group: Group) -> None:
    assert importlib.util.find_spec("wandb") is not None
    names = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME")
    told = await group.call(FakeWorker.tell, lambda: [os.environ[name] for name in names])
    assert told == [["1", "", "lo"]] * 3
    assert await group.call(FakeWorker.tell, lambda: importlib.util.find_spec("wandb")) == [None] * 3


def test_one_failing_rank_ends_the_wait_for_the_others(session: Session, make_group: MakeGroup) -> None:
    group = make_group()
    session.run(answer_of(lambda: group.call(FakeWorker.noted)))
    start = time.perf_counter()
    with pytest.raises(WorkerError) as failure:
        session.run(answer_of(lambda: group.named("actor").call(FakeWorker.fail_on, 2, 60.0)))
    assert time.perf_counter() - start < 30
    text = str(failure.value)
    assert text.startswith("train rank 2 failed in actor.fail_on: ArithmeticError('the loss is a teapot')")
    assert 'raise ArithmeticError("the loss is a teapot")' in text, "the traceback of the process is missing"
    with pytest.raises(WorkerError, match=r"train rank 2 failed in actor\.fail_on"):
        session.run(answer_of(lambda: group.call(FakeWorker.noted)))


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (FakeWorker.give_up, "sync aborted: rank 1: lm_head.weight is missing"),
        (
            FakeWorker.fill_the_disk,
            "run/0.bin: No space left on device (8 MiB needed, 0 B free); make space, and start the run again",
        ),
    ],
)
@pytest.mark.usefixtures("drop_broken_calls")
def test_equal_errors_of_all_ranks_make_one_line(
    session: Session, group: Group, method: RemoteMethod[FakeWorker, [], None], message: str
) -> None:
    with pytest.raises(WorkerError) as failure:
        session.run(answer_of(lambda: group.named("actor").call(method)))
    assert re.fullmatch(rf"train rank \d failed in actor.{method.name}: {re.escape(message)}", str(failure.value))


async def test_a_tolerated_error_is_part_of_the_result(group: Group) -> None:
    call = group.named("actor").call(FakeWorker.give_up)
    call.tolerates = RunError
    assert await call == []
    assert call.results == {}
    reason = "sync aborted: rank 1: lm_head.weight is missing"
    assert call.errors == {rank: f"train rank {rank} failed in actor.give_up: {reason}" for rank in range(3)}
    assert call.unanswered == []


def test_waiting_for_one_call_raises_the_failure_of_another(session: Session, make_group: MakeGroup) -> None:
    broken, busy = make_group(), make_group()

    async def wait_for_the_other() -> None:
        broken.named("critic").call(FakeWorker.fail_on, 0, 60.0)
        await busy.named("actor").call(FakeWorker.note, "long", 60.0)

    with pytest.raises(WorkerError, match=r"train rank 0 failed in critic\.fail_on"):
        session.run(wait_for_the_other())


def test_a_failure_between_two_waits_of_the_driver_is_raised(session: Session, make_group: MakeGroup) -> None:
    """The driver runs no loop when the answer arrives."""
    broken, well = make_group(), make_group()

    async def begin() -> None:
        await well.call(FakeWorker.noted)
        broken.named("critic").call(FakeWorker.give_up)

    session.run(begin())
    time.sleep(2.0)
    with pytest.raises(WorkerError, match=r"failed in critic\.give_up"):
        session.run(answer_of(lambda: well.call(FakeWorker.note, "long", 60.0)))


def test_a_failed_column_names_the_call_that_made_it(session: Session, make_group: MakeGroup) -> None:
    group, reader = make_group(), make_group()

    async def read() -> None:
        column = group.named("actor").submit(FakeWorker.fail_for_column, [(0,)] * 3, chunks=[(0,), (), ()]).chunks
        await reader.call(FakeWorker.means, column, [0])

    with pytest.raises(WorkerError, match=r"^train rank 0 failed in actor\.fail_for_column"):
        session.run(read())


def test_a_dead_rank_is_named_rather_than_the_peers_that_lost_it(session: Session, make_group: MakeGroup) -> None:
    group = make_group()
    session.run(answer_of(lambda: group.call(FakeWorker.noted)))
    with pytest.raises(WorkerError) as failure:
        session.run(answer_of(lambda: group.named("actor").call(FakeWorker.die_on, 1)))
    text = str(failure.value)
    assert text.startswith("train rank 1 died in actor.die_on")
    assert "these are my last words" in text
    assert "also failed: train rank 0, train rank 2" in text


@pytest.fixture
def limited(session: Session) -> Iterator[None]:
    """Updates may take three seconds, other phases a minute."""
    session.monitor = CallMonitor(TimeLimits(**{**dict.fromkeys(get_args(Phase), 60.0), "update": 3.0}))
    yield
    forget_calls(session)


def test_every_phase_has_a_limit() -> None:
    assert list(get_args(Phase)) == list(TimeLimits.model_fields)


@pytest.mark.usefixtures("limited")
def test_a_rank_that_does_not_answer_is_named(session: Session, make_group: MakeGroup) -> None:
    group = make_group()

    async def update() -> None:
        hanging = group.named("actor").call(FakeWorker.hang_on, 1)
        group.named("critic").call(FakeWorker.note, "waits for the actor's")
        await hanging

    session.run(answer_of(lambda: group.call(FakeWorker.noted)))
    start = time.perf_counter()
    with pytest.raises(WorkerError) as failure:
        session.run(update())
    assert 3.0 <= time.perf_counter() - start < 30
    first, second, third, *words = str(failure.value).splitlines()
    assert first == "No answer within 3 s from train rank 1 in actor.hang_on."
    assert second == "Raise cluster.time_limits.update if it may take longer."
    assert "train rank 1 in critic.note" in third
    assert "I sit down" in words
