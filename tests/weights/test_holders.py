"""Trainers and engines as holders: senders and receivers by placement."""

from __future__ import annotations

import pytest

from megarl.models import model_spec
from megarl.resharding.spec import plan_sync, trainer_holders
from megarl.types import Layout
from megarl.weights.planner import Distance, Holder, Place
from megarl.weights.shard_map import ShardMap
from tests.weights.models import qwen2_config

SPEC = model_spec(qwen2_config())


@pytest.mark.parametrize(
    ("trainers", "engines", "senders"),
    [
        pytest.param([(0, 0), (1, 1)], [(1, None), (0, None)], {2: {1}, 3: {0}}, id="same node"),
        pytest.param([(0, 0), (0, 1)], [(0, 1), (0, 0)], {2: {1}, 3: {0}}, id="same device"),
        pytest.param([(0, 0), (1, 1)], [(1, 2), (0, 0)], {2: {1}, 3: {0}}, id="node for one, device for the other"),
    ],
)
def test_weights_come_from_the_nearest_replica(
    trainers: list[tuple[int, int]], engines: list[tuple[int, int | None]], senders: dict[int, set[int]]
) -> None:
    transfers = plan_sync(
        SPEC,
        Layout(dp=2),
        [Place(node=node, device=device) for node, device in trainers],
        1,
        [Place(node=node, device=device) for node, device in engines],
        1 << 20,
    )
    assert {rank: receiver.senders for rank, receiver in transfers.receivers.items()} == senders


def test_distances_are_between_processes_devices_and_nodes() -> None:
    nothing = ShardMap(params={}, shards=())

    def at(rank: int, node: int, device: int | None) -> Holder:
        return Holder(rank=rank, map=nothing, node=node, device=device)

    here = at(0, 0, 3)
    assert here.distance(at(0, 1, 4)) is Distance.RANK
    assert here.distance(at(1, 0, 3)) is Distance.DEVICE
    assert here.distance(at(1, 0, 4)) is Distance.NODE
    assert here.distance(at(1, 1, 4)) is Distance.NETWORK
    assert at(1, 0, None).distance(at(2, 0, None)) is Distance.NODE, "to be on no device is not to share one"


def test_replicas_share_one_shard_map() -> None:
    layout = Layout(tp=2, pp=2, dp=2)
    holders = trainer_holders(SPEC, layout, [Place()] * layout.world_size, first=10)
    assert [holder.rank for holder in holders] == list(range(10, 18))
    assert len({id(holder.map) for holder in holders}) == 4
    for holder in holders:
        assert holder.map == SPEC.megatron_map(layout, holder.rank - 10)
    with pytest.raises(ValueError, match="zip"):
        trainer_holders(SPEC, layout, [Place()])
