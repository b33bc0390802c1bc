"""Syncs between four real Gloo processes: what arrives, what is counted, and how failures end."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megarl.resharding import SyncSpec, serve_store
from megarl.resharding.buckets import CHECKSUM_BYTES
from megarl.weights.plans import TransferPlan
from tests.pool import RankPool
from tests.resharding import jobs

pytestmark = pytest.mark.dist


class Connections:
    """Makes specs that name one store."""

    def __init__(self) -> None:
        self.store = serve_store()
        self.count = 0

    def __call__(self, plan: TransferPlan, *, timeout_s: float = 20.0, verify: bool = True) -> SyncSpec:
        self.count += 1
        return SyncSpec.of(
            plan,
            name=f"sync{self.count}",
            host="127.0.0.1",
            port=self.store.port,
            world_size=jobs.RANKS,
            timeout_s=timeout_s,
            verify=verify,
        )


@pytest.fixture(scope="module")
def connect() -> Connections:
    return Connections()


@pytest.mark.parametrize(
    ("bucket_bytes", "dtype", "verify"),
    [
        (512, "float32", True),
        (4096, "float32", False),
        (4096, "bfloat16", True),
        (1 << 20, "float32", True),
    ],
)
def test_shards_arrive_whole_once_and_in_two_buckets(
    pool: RankPool, connect: Connections, bucket_bytes: int, dtype: str, verify: bool
) -> None:
    plan = jobs.transfer_plan(bucket_bytes, dtype)
    results = pool.run(jobs.two_syncs, connect(plan, verify=verify), world_size=jobs.RANKS)

    checksum = CHECKSUM_BYTES if verify else 0
    for rank, (stats, once, twice, order, (sent, received), state) in enumerate(results):
        part = plan.senders.get(rank) or plan.receivers[rank]
        messages = sum(map(len, part.messages)) if rank >= jobs.TRAINERS else len(part.messages)
        assert [(s.version, s.nbytes, s.messages) for s in stats] == [(v, part.nbytes, messages) for v in (3, 4)]
        assert sum((sent if rank < jobs.TRAINERS else received).values()) == 2 * (part.nbytes + checksum * messages)
        assert not (received if rank < jobs.TRAINERS else sent)
        assert state[:2] == (4, True)
        if rank < jobs.TRAINERS:
            continue
        shard = jobs.engine_map(rank, dtype)
        assert order == [*shard.params, *shard.params]
        holes = sum(hole.box.size for hole in shard.holes)
        assert part.nbytes == shard.nbytes - holes * (4 if dtype == "float32" else 2)
        for scale, loaded in ((1, once), (2, twice)):
            for name, tensor in jobs.weights(shard, scale).items():
                assert torch.equal(loaded[name], tensor.to(getattr(torch, dtype))), (rank, name)


@pytest.mark.parametrize("bucket_bytes", [1024, 2048, 1 << 20])
def test_memory_keeps_to_the_configured_buckets(pool: RankPool, connect: Connections, bucket_bytes: int) -> None:
    largest = max(info.nbytes for rank in (2, 3) for info in jobs.engine_map(rank).params.values())
    assert bucket_bytes == 1 << 20 or largest > 4 * bucket_bytes
    frame, param = 32, 16  # at most, for the checksum and the alignment of a message, and for a parameter's alignment
    plan = jobs.transfer_plan(bucket_bytes)
    results = pool.run(jobs.staging, connect(plan), world_size=jobs.RANKS)
    for rank, (stated, allocated) in enumerate(results):
        if rank < jobs.TRAINERS:
            bound = 2 * (bucket_bytes + frame)
        else:
            grouped = max(len(bucket.params) for bucket in plan.receivers[rank].buckets)
            bound = bucket_bytes + jobs.TRAINERS * frame + max(bucket_bytes, largest) + grouped * param
        assert stated == allocated
        assert 0 < allocated <= bound, rank


def one_message(results: list[Any]) -> str:
    """The error that every rank raised."""
    messages = {message for message, _ in results}
    assert len(messages) == 1, messages
    return messages.pop()


def test_a_corrupt_message_aborts_everywhere(pool: RankPool, connect: Connections) -> None:
    results = pool.run(jobs.faulty, connect(jobs.transfer_plan()), {1: {"flip": 3}}, {}, world_size=jobs.RANKS)
    message = one_message([first for first, *_ in results])
    assert "from rank 1 for bucket" in message
    assert "is corrupt: model.layers." in message
    versions, consistent, loads = zip(*(state for _, state, _ in results), strict=True)
    assert versions == (-1,) * jobs.RANKS
    assert any(loads)
    assert list(consistent) == [count == 0 for count in loads]
    # The connection is broken: the next sync is refused everywhere, and quickly.
    assert all(isinstance(second, tuple) and second[1] < 5 for *_, second in results)


def test_a_failing_load_aborts_everywhere(pool: RankPool, connect: Connections) -> None:
    spec = connect(jobs.transfer_plan())
    results = pool.run(jobs.faulty, spec, {}, {2: "model.layers.2.mlp.down_proj.weight"}, world_size=jobs.RANKS)
    message = one_message([first for first, *_ in results])
    assert message == "sync aborted: rank 2: model.layers.2.mlp.down_proj.weight: no room"


def test_a_rank_that_is_gone_is_noticed_at_once(pool: RankPool, connect: Connections) -> None:
    spec = connect(jobs.transfer_plan(), timeout_s=60.0)
    results = pool.run(jobs.faulty, spec, {0: {"hang_up": 2}}, {}, world_size=jobs.RANKS)
    first = [result[0] for result in results if result]
    assert len(first) == jobs.RANKS - 1
    assert "the transfer with rank" in one_message(first)
    assert max(seconds for _, seconds in first) < 10


def test_a_missing_sender_is_named_and_nothing_is_written(pool: RankPool, connect: Connections) -> None:
    results = pool.run(jobs.late, connect(jobs.transfer_plan()), 1, 1.5, world_size=jobs.RANKS)
    assert "ranks [1] did not come within 1.5 s" in one_message([first for first, *_ in results])
    assert {state for _, state, *_ in results} == {(-1, True, 0)}
    # Nothing was under way: the connection still works.
    assert [state[0] for *_, state in results] == [2] * jobs.RANKS


def test_ranks_with_different_plans_do_not_start(pool: RankPool, connect: Connections) -> None:
    plan, other = jobs.transfer_plan(4096), jobs.transfer_plan(8192)
    results = pool.run(jobs.misled, connect(plan), connect(other), 2, world_size=jobs.RANKS)
    message = one_message([first for first, _ in results])
    assert "differs from another rank's" in message
    assert plan.fingerprint in message
    assert other.fingerprint in message
    assert {state for _, state in results} == {(-1, True, 0)}


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


def test_an_incomplete_part_of_the_plan_is_refused(pool: RankPool, connect: Connections) -> None:
    results = pool.run(jobs.incomplete, connect(jobs.transfer_plan(1 << 20)), 2, world_size=jobs.RANKS)
    message = one_message([first for first, _ in results])
    assert message.startswith("sync aborted: rank 2: the messages do not bring all of model.")
    assert {state for _, state in results} == {(-1, True, 0)}


def test_parameters_that_are_not_as_planned_are_listed(pool: RankPool, connect: Connections) -> None:
    results = pool.run(jobs.misshapen, connect(jobs.transfer_plan()), world_size=jobs.RANKS)
    message = one_message([first for first, _ in results])
    assert message.startswith("sync aborted: rank 1: ")
    assert "0:decoder.layers.1.mlp.linear_fc2.weight has shape (3, 40), planned was (24, 40)" in message
    assert "0:decoder.final_layernorm.weight is missing" in message
    assert {state for _, state in results} == {(-1, True, 0)}
