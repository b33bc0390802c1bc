"""Calls on real processes: order, references, and failures that are raised immediately with their cause."""

from __future__ import annotations

import importlib.util
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
from megarl.remote import Phase
from tests.cluster.conftest import MakeGroup
from tests.cluster.fakes import FakeWorker

Group = WorkerGroup[FakeWorker]

pytestmark = pytest.mark.process


def test_calls_return_at_once_and_run_in_the_order_of_submission(group: Group) -> None:
    group.call(FakeWorker.note, "first").wait()
    start = time.perf_counter()
    slow = group.call(FakeWorker.note, "slow", 3.0)
    group.call(FakeWorker.note, "quick")
    submitted = time.perf_counter() - start
    orders = group.call(FakeWorker.noted).wait()
    assert orders == [["first", "slow", "quick"]] * 3
    assert slow.wait() == [0, 1, 2]
    assert submitted < 3.0
    assert 3.0 <= slow.longest() < time.perf_counter() - start, (
        "the time of the ranks, the wait for a turn not included"
    )


def test_another_thread_is_told_the_calls_in_progress_and_their_time(group: Group) -> None:
    slow, later = group.call(FakeWorker.note, "slow", 2.0), group.call(FakeWorker.noted)
    told: list[str] = []
    asking = threading.Timer(0.7, lambda: told.extend(slow.monitor.in_progress()))
    asking.start()
    later.wait()
    asking.join()
    first, second = told
    assert re.fullmatch(r"train rank 0, train rank 1, train rank 2 in train.note: [12] of \d+ s", first), first
    assert second == "train rank 0, train rank 1, train rank 2 in train.noted: its limit has not begun"


def test_a_column_comes_back_by_chunk_from_the_ranks_that_report_it(group: Group) -> None:
    reporters = {1: [0, 3], 2: [1, 2]}
    call = group.call_by_chunk(FakeWorker.column, [reporters] * 3, [(), (0, 3), (1, 2)])
    assert call.wait() == [None, "by 1", "by 2"]
    assert call.longest() > 0
    assert [int(call.chunks[chunk][0]) for chunk in range(len(call.chunks))] == [0, 1, 2, 3]


def test_a_reporting_rank_without_chunks_still_returns_its_result(group: Group) -> None:
    call = group.call_by_chunk(FakeWorker.column, [{0: [], 1: [0]}] * 3, [(), (0,), ()])
    assert call.wait() == ["by 0", "by 1", None]


def test_workers_read_columns_by_reference_before_the_driver_waits(group: Group) -> None:
    column = group.call_by_chunk(FakeWorker.column, [{0: [0, 1, 2]}] * 3, [(0, 1, 2), (), ()]).chunks
    means = group.call(FakeWorker.means, column, [2, 0])
    assert means.wait() == [[2.0, 0.0]] * 3
    assert not column._fetched, "the driver has fetched a chunk"


def test_a_worker_maps_a_chunk_from_the_object_store(group: Group) -> None:
    column = group.call_by_chunk(FakeWorker.column, [{0: [0]}] * 3, [(0,), (), ()]).chunks
    assert not column[0].flags.owndata
    assert not column[0].flags.writeable


def test_a_process_on_a_virtual_device_computes_on_one_thread_and_sees_no_gpu(group: Group) -> None:
    assert group.call(FakeWorker.environment, "OMP_NUM_THREADS").wait() == ["1"] * 3
    assert group.call(FakeWorker.environment, "CUDA_VISIBLE_DEVICES").wait() == [""] * 3
    assert group.call(FakeWorker.environment, "GLOO_SOCKET_IFNAME").wait() == ["lo"] * 3


def test_workers_cannot_import_wandb(group: Group) -> None:
    assert importlib.util.find_spec("wandb") is not None
    assert group.call(FakeWorker.can_import, "wandb").wait() == [False] * 3


def test_one_failing_rank_ends_the_wait_for_the_others(make_group: MakeGroup) -> None:
    group = make_group()
    group.call(FakeWorker.noted).wait()
    start = time.perf_counter()
    update = group.named("actor").call(FakeWorker.fail_on, 2, 60.0)
    with pytest.raises(WorkerError) as failure:
        update.wait()
    assert time.perf_counter() - start < 30
    text = str(failure.value)
    assert text.startswith("train rank 2 failed in actor.fail_on: ArithmeticError('the loss is a teapot')")
    assert 'raise ArithmeticError("the loss is a teapot")' in text, "the traceback of the process is missing"
    with pytest.raises(WorkerError, match=r"train rank 2 failed in actor\.fail_on"):
        update.wait()


def test_equal_errors_of_all_ranks_make_one_message(group: Group) -> None:
    with pytest.raises(WorkerError) as failure:
        group.named("actor").call(FakeWorker.give_up).wait()
    expected = r"train rank \d failed in actor.give_up: sync aborted: rank 1: lm_head.weight is missing"
    assert re.fullmatch(expected, str(failure.value)), failure.value


def test_a_full_disk_is_told_in_one_line(group: Group) -> None:
    with pytest.raises(WorkerError) as failure:
        group.named("actor").call(FakeWorker.fill_the_disk, "run/checkpoints/0.bin").wait()
    what = (
        "run/checkpoints/0.bin: No space left on device (8 MiB needed, 0 B free); make space, and start the run again"
    )
    assert re.fullmatch(f"train rank \\d failed in actor.fill_the_disk: {re.escape(what)}", str(failure.value))


def test_a_tolerated_error_is_part_of_the_result(group: Group) -> None:
    call = group.named("actor").call(FakeWorker.give_up)
    call.tolerates = RunError
    call.monitor.wait_until(call)
    assert call.results == {}
    reason = "sync aborted: rank 1: lm_head.weight is missing"
    assert call.errors == {rank: f"train rank {rank} failed in actor.give_up: {reason}" for rank in range(3)}
    assert call.unanswered == []


def test_waiting_for_one_call_raises_the_failure_of_another(make_group: MakeGroup) -> None:
    broken, busy = make_group(), make_group()
    broken.named("critic").call(FakeWorker.fail_on, 0, 60.0)
    with pytest.raises(WorkerError, match=r"train rank 0 failed in critic\.fail_on"):
        busy.named("actor").call(FakeWorker.note, "long", 60.0).wait()


def test_a_failed_column_names_the_call_that_made_it(make_group: MakeGroup) -> None:
    group, reader = make_group(), make_group()
    column = group.named("actor").call_by_chunk(FakeWorker.fail_for_column, [0] * 3, [(0,), (), ()]).chunks
    with pytest.raises(WorkerError, match=r"^train rank 0 failed in actor\.fail_for_column"):
        reader.call(FakeWorker.means, column, [0]).wait()


def test_a_dead_rank_is_named_rather_than_the_peers_that_lost_it(make_group: MakeGroup) -> None:
    group = make_group()
    group.call(FakeWorker.noted).wait()
    with pytest.raises(WorkerError) as failure:
        group.named("actor").call(FakeWorker.die_on, 1).wait()
    text = str(failure.value)
    assert text.startswith("train rank 1 died in actor.die_on")
    assert "these are my last words" in text
    assert "also failed: train rank 0, train rank 2" in text


@pytest.fixture
def limited(session: Session) -> Iterator[None]:
    """Updates may take three seconds, other phases a minute."""
    session.monitor = CallMonitor(TimeLimits(**{**dict.fromkeys(get_args(Phase), 60.0), "update": 3.0}))
    yield
    session.monitor = CallMonitor(TimeLimits())


def test_every_phase_has_a_limit() -> None:
    assert list(get_args(Phase)) == list(TimeLimits.model_fields)


@pytest.mark.usefixtures("limited")
def test_a_rank_that_does_not_answer_is_named(make_group: MakeGroup) -> None:
    group = make_group()
    group.call(FakeWorker.noted).wait()
    start = time.perf_counter()
    update = group.named("actor").call(FakeWorker.hang_on, 1)
    group.named("critic").call(FakeWorker.note, "waits for the actor's")
    with pytest.raises(WorkerError) as failure:
        update.wait()
    assert 3.0 <= time.perf_counter() - start < 30
    first, second, third, *words = str(failure.value).splitlines()
    assert first == "No answer within 3 s from train rank 1 in actor.hang_on."
    assert second == "Raise cluster.time_limits.update if it may take longer."
    assert "train rank 1 in critic.note" in third
    assert "I sit down" in words


@pytest.mark.usefixtures("limited")
def test_a_queued_call_has_its_full_time_limit(make_group: MakeGroup) -> None:
    group = make_group()
    group.call(FakeWorker.noted).wait()
    calls = [group.named("actor").call(FakeWorker.note, str(turn), 0.5) for turn in range(7)]
    assert calls[-1].wait() == [0, 1, 2]  # 3.5 s after it was submitted
