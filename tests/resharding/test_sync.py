"""Syncs between four real processes: contents by every transport, statistics, and refusals."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from tests.pool import RankPool
from tests.resharding import jobs
from tests.resharding.ways import WAYS, Connections, check_colocated

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def connect() -> Connections:
    return Connections()


@pytest.mark.parametrize(
    ("way", "bucket_bytes", "dtype", "verify"),
    [
        ("shared", 512, "float32", True),
        ("shared", 4096, "bfloat16", False),
        ("shared", 1 << 20, "float32", True),
        ("gloo", 512, "float32", True),
        ("gloo", 4096, "float32", False),
        ("gloo", 1 << 20, "bfloat16", True),
        ("mixed", 1000, "float32", True),
        ("two hops", 512, "bfloat16", True),
        ("two hops", 4096, "float32", False),
    ],
)
def test_every_shard_arrives_exactly_once(
    pool: RankPool, connect: Connections, way: str, bucket_bytes: int, dtype: str, verify: bool
) -> None:
    plan = jobs.transfer_plan(bucket_bytes, dtype)
    spec = connect(plan, way, verify=verify)
    results = pool.run(jobs.two_syncs, spec, world_size=jobs.RANKS)

    carried = Counter()
    for rank, (stats, once, twice, order, (put, frames), state) in enumerate(results):
        part = plan.senders.get(rank) or plan.receivers[rank]
        messages = sum(map(len, part.messages)) if rank >= jobs.TRAINERS else len(part.messages)
        assert all(hasattr(s, "version") for s in stats), stats
        assert [(s.version, s.nbytes, s.messages) for s in stats] == [(v, part.nbytes, messages) for v in (3, 4)]
        assert state[:2] == (4, True)
        if rank < jobs.TRAINERS:
            carried.update(put)
            assert sum(frames.values()) <= 2 * (part.nbytes + sum(p.nbytes for p in plan.receivers.values()))
            continue
        if way == "gloo":
            assert frames == {sender: 2 * _nbytes(part, sender) for sender in range(jobs.TRAINERS)}
        shard_map = jobs.engine_map(rank, dtype)
        assert order == 2 * list(plan.receivers[rank].params)
        padding = sum(box.size for _, box in shard_map.padding)
        assert part.nbytes == shard_map.nbytes - padding * (4 if dtype == "float32" else 2)
        for scale, loaded in ((1, once), (2, twice)):
            for name, tensor in jobs.weights(shard_map, scale).items():
                assert torch.equal(loaded[name], tensor.to(getattr(torch, dtype))), (rank, name)
    if way == "shared":
        assert carried == {rank: 2 * part.nbytes for rank, part in plan.receivers.items()}


def _nbytes(part: Any, sender: int) -> int:
    return sum(message.nbytes for bucket in part.messages for message in bucket if message.sender == sender)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bucket_bytes", [1024, 2048, 1 << 20])
def test_staging_memory_is_at_most_two_buckets(
    pool: RankPool, connect: Connections, way: str, bucket_bytes: int
) -> None:
    plan = jobs.transfer_plan(bucket_bytes)
    largest = max(info.nbytes for part in plan.receivers.values() for info in part.params.values())
    assert bucket_bytes == 1 << 20 or largest > 4 * bucket_bytes
    results = pool.run(jobs.staging, connect(plan, way), world_size=jobs.RANKS)
    alignment = 16 * jobs.RANKS  # at most, for each frame and each bucket
    for rank, (stated, used) in enumerate(results):
        if way == "shared" and rank < jobs.TRAINERS:
            assert stated == used == 0  # copies go directly to their destinations
        elif way == "two hops":  # the engines' memory is that of their network ranks, beside what those send
            assert stated <= (4 * bucket_bytes + alignment if rank < jobs.TRAINERS else 0)
        else:
            assert 0 < used == stated <= 2 * bucket_bytes + alignment


def one_message(results: list[Any]) -> str:
    """The error that every rank raised."""
    messages = {message for message, _ in results}
    assert len(messages) == 1, messages
    return messages.pop()


def test_a_missing_sender_is_named_and_nothing_is_written(pool: RankPool, connect: Connections) -> None:
    results = pool.run(jobs.late, connect(jobs.transfer_plan()), 1, 3.0, world_size=jobs.RANKS)
    assert "ranks [1] did not come within 3 s" in one_message([first for first, *_ in results])
    assert {state for _, state, *_ in results} == {(-1, True, 0)}
    # Nothing was under way: the connection still works.
    assert [state[0] for *_, state in results] == [2] * jobs.RANKS


def test_ranks_with_different_plans_do_not_connect(pool: RankPool, connect: Connections) -> None:
    plan, other = jobs.transfer_plan(4096), jobs.transfer_plan(8192)
    (message,) = set(pool.run(jobs.wrong_plan, connect(plan), connect(other), 2, world_size=jobs.RANKS))
    assert "differs from another rank's" in message
    assert plan.fingerprint in message
    assert other.fingerprint in message


def test_versions_never_go_backwards(pool: RankPool, connect: Connections) -> None:
    # The second round asks for an older version; in the third, rank 3 asks for another one than the rest.
    asked = {rank: [5, 4, 7 if rank == 3 else 6, 8] for rank in range(jobs.RANKS)}
    results = pool.run(jobs.versions, connect(jobs.transfer_plan()), asked, world_size=jobs.RANKS)
    good, stale, mixed, after = zip(*results, strict=True)
    assert {state[0] for _, state in good} == {5}
    assert "version 4 is below version 5" in one_message([error for error, _ in stale])
    assert "differs from another rank's" in one_message([error for error, _ in mixed])
    assert {state[:2] for _, state in (*stale, *mixed)} == {(5, True)}
    assert {state[0] for _, state in after} == {8}


def test_parameters_that_differ_from_the_plan_are_listed(pool: RankPool, connect: Connections) -> None:
    results = pool.run(jobs.misshapen, connect(jobs.transfer_plan()), world_size=jobs.RANKS)
    message = one_message([first for first, _ in results])
    assert message.startswith("sync aborted: rank 1: ")
    assert "0:decoder.layers.1.mlp.linear_fc2.weight has shape (3, 40), planned was (24, 40)" in message
    assert "0:decoder.final_layernorm.weight is missing" in message
    assert {state for _, state in results} == {(-1, True, 0)}


def test_a_colocated_engine_process_reads_the_memory_of_its_trainer() -> None:
    check_colocated("cpu")
