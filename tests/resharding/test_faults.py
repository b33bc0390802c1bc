"""Failing syncs between real processes: every rank raises the same error, soon, and nothing is left."""

from __future__ import annotations

from typing import Any

import pytest

from tests.leftovers import Trace
from tests.resharding import jobs
from tests.resharding.processes import run
from tests.resharding.ways import WAYS, Connections

pytestmark = pytest.mark.dist

TIMEOUT_S = 3.0


@pytest.fixture(scope="module")
def connect() -> Connections:
    return Connections()


def one_message(results: dict[int, Any]) -> str:
    """The error that every rank raised, and soon."""
    messages = {first[0] for first, *_ in results.values()}
    assert len(messages) == 1, messages
    assert max(first[1] for first, *_ in results.values()) < TIMEOUT_S + 40  # which a busy machine may take
    return messages.pop()


def check_states(results: dict[int, Any]) -> list[int]:
    """Checks that nothing is committed and exactly the ranks written to are inconsistent; returns their loads."""
    versions, consistent, loads = zip(*(state for _, state, *_ in results.values()), strict=True)
    assert set(versions) == {-1}
    assert list(consistent) == [count == 0 for count in loads]
    return list(loads)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("when", ["sending", "loading"])
def test_a_rank_killed_during_a_sync_aborts_it(connect: Connections, way: str, when: str) -> None:
    trace = Trace()
    odd = 0 if when == "sending" else 3
    spec = connect(jobs.transfer_plan(512), way, timeout_s=60.0)
    results = run(jobs.killed, spec, odd, when, world_size=jobs.RANKS)
    assert set(results) == set(range(jobs.RANKS)) - {odd}
    message = one_message(results)  # long before the timeout
    assert f"rank {odd}" in message
    assert "model." in message
    check_states(results)
    assert not trace.shared_memory()


def test_a_wait_for_a_dead_rank_names_it(connect: Connections) -> None:
    told = run(jobs.peer_killed, connect(jobs.transfer_plan(), "gloo"), world_size=jobs.RANKS)[2]
    assert [error.partition(" failed: ")[0] for error in told] == ["not done: the transfer with rank 0"] * 3


@pytest.mark.parametrize("odd", [1, 2])
@pytest.mark.parametrize("when", ["before", "committing"])
def test_an_absent_rank_is_named(connect: Connections, when: str, odd: int) -> None:
    results = run(jobs.killed, connect(jobs.transfer_plan(), timeout_s=TIMEOUT_S), odd, when, world_size=jobs.RANKS)
    assert f"ranks [{odd}] did not come within {TIMEOUT_S:g} s" in one_message(results)
    loads = check_states(results)
    assert any(loads) == (when == "committing")


@pytest.mark.parametrize("way", ["shared", "gloo", "two hops"])
def test_a_corrupt_message_aborts_everywhere(connect: Connections, way: str) -> None:
    results = run(jobs.corrupted, connect(jobs.transfer_plan(), way), 1, 3, world_size=jobs.RANKS)
    message = one_message(results)
    assert "the message from rank 1 for bucket" in message
    assert "is corrupt: model.layers." in message
    check_states(results)
    # The connection is broken: the next sync is refused everywhere, and quickly.
    assert all("connect anew" in second[0] and second[1] < 15 for *_, second in results.values())


def test_a_failing_load_aborts_everywhere(connect: Connections) -> None:
    results = run(jobs.failing_load, connect(jobs.transfer_plan()), 2, 4, world_size=jobs.RANKS)
    assert one_message(results) == "sync aborted: rank 2: the layer has no room"
    assert any(check_states(results))
