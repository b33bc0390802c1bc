"""The transport of every message: by hand, for CPUs and for CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from megarl.resharding import SyncSpec
from megarl.weights.planner import Holder, Place, plan
from megarl.weights.shard_map import Box, Shard, ShardMap, TensorInfo

HALVES = [
    ShardMap(
        params={"w": TensorInfo((2, 3), "float32")},
        shards=(Shard(param="w", box=Box.whole((2, 3)), name="w", region=Box((2 * i, 0), (2 * i + 2, 3))),),
    )
    for i in range(2)
]
WHOLE = ShardMap.identity({"w": TensorInfo((4, 3), "float32")})
PLAN = plan([Holder(rank=i, map=HALVES[i]) for i in range(2)], [Holder(rank=i, map=WHOLE) for i in (2, 3)], 1 << 20)
"""Two trainers with half a matrix each, two engines with the whole one."""


def spec_of(places: Sequence[Place], **options: Any) -> SyncSpec:
    return SyncSpec.of(PLAN, name="test", host="localhost", port=1, places=places, **options)


def on(*nodes: int) -> list[Place]:
    """Devices numbered over all nodes."""
    return [Place(node=node, device=device) for device, node in enumerate(nodes)]


def ways(spec: SyncSpec) -> dict[int, tuple[int, set[int], int]]:
    """By receiver: the owner of its memory, who sends frames, and how many buckets there are at once."""
    return {rank: (way.owner, set(way.via_network), way.depth) for rank, way in spec.recv_buffers.items()}


def test_ranks_of_one_node_write_in_place() -> None:
    spec = spec_of(on(0, 0, 0, 0))
    assert ways(spec) == {2: (2, set(), 2), 3: (3, set(), 2)}
    assert spec.wire == ()
    assert [spec.only([rank]).peers(rank) for rank in range(4)] == [[2, 3], [2, 3], [0, 1], [0, 1]]
    assert ways(spec_of(on(0, 0, 0, 0), transport="shared_memory")) == ways(spec)


def test_ranks_of_other_nodes_send_frames() -> None:
    spec = spec_of(on(0, 1, 0, 1))
    assert ways(spec) == {2: (2, {1}, 1), 3: (3, {0}, 1)}
    assert spec.wire == (0, 1, 2, 3)
    assert [spec.only([rank]).wire_peers(rank) for rank in range(4)] == [[3], [2], [1], [0]]
    assert ways(spec_of(on(0, 0, 0, 0), transport="gloo")) == {2: (2, {0, 1}, 1), 3: (3, {0, 1}, 1)}


def test_engines_on_separate_gpus_use_the_network() -> None:
    spec = spec_of(on(0, 0, 0, 0), device="cuda")
    assert ways(spec) == {2: (2, {0, 1}, 1), 3: (3, {0, 1}, 1)}
    assert spec.wire == (0, 1, 2, 3)


def test_no_two_network_ranks_share_a_gpu() -> None:
    spec = spec_of([*on(0, 0), *on(0, 0)], device="cuda")
    assert ways(spec) == {2: (0, {1}, 1), 3: (1, {0}, 1)}
    assert spec.wire == (0, 1)
    assert [spec.only([rank]).peers(rank) for rank in range(4)] == [[1, 2], [0, 3], [0], [1]]
    assert [spec.only([rank]).wire_peers(rank) for rank in range(4)] == [[1], [0], [], []]


def test_a_rank_gets_its_own_messages_and_the_memory_that_it_writes_to() -> None:
    own = spec_of([*on(0, 0), *on(0, 0)], device="cuda").only([1])
    assert (set(own.senders), set(own.recv_buffers)) == ({1}, {2, 3})
    assert [rank for rank, buffer in own.recv_buffers.items() if buffer.messages] == [3]


def test_shared_memory_across_nodes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shared_memory does not reach from ranks \[1\] to rank 2"):
        spec_of(on(0, 1, 0, 1), transport="shared_memory")
