"""Where devices are, and which rank reports which chunk: decided without a cluster."""

from __future__ import annotations

import pytest

from megarl.cluster.group import chunks_by_rank
from megarl.cluster.placement import bundles_by_node, visible_devices
from megarl.cluster.session import Session
from megarl.types import Layout, PackRow, RankSchedule, Schedule


def test_bundles_of_a_node_become_neighbouring_devices() -> None:
    assert bundles_by_node({0: "b", 1: "a", 2: "b", 3: "a"}, 2, {}) == [0, 2, 1, 3]


def test_nodes_with_a_number_come_in_its_order() -> None:
    hosts = {0: "b", 1: "a", 2: "c", 3: "a", 4: "b", 5: "c"}
    assert bundles_by_node(hosts, 2, {"c": 0, "a": 1, "b": 2}) == [2, 5, 1, 3, 0, 4]
    assert bundles_by_node(hosts, 2, {"a": 0}) == [1, 3, 0, 4, 2, 5]


def test_nodes_with_another_number_of_devices_are_refused() -> None:
    with pytest.raises(RuntimeError, match="devices_per_node is 2, and Ray placed 3"):
        bundles_by_node({0: "a", 1: "a", 2: "a", 3: "b"}, 2, {})


@pytest.mark.parametrize(
    ("inherited", "visible"), [(None, "1,3"), ("4,5,6,7", "5,7"), ("GPU-a,GPU-b,GPU-c,GPU-d", "GPU-b,GPU-d")]
)
def test_a_process_sees_its_own_gpus_of_those_that_the_node_may_use(inherited: str | None, visible: str) -> None:
    assert visible_devices((1, 3), inherited) == visible
    assert visible_devices((), inherited) == "", "a process without a device sees one"


def test_devices_of_virtual_nodes_tell_near_from_far(session: Session) -> None:
    slots = session.placement.slots
    assert [(slot.device, slot.node, slot.local) for slot in slots] == [(i, 0, i) for i in range(4)]


def test_the_last_stage_reports_the_chunks_of_its_replica() -> None:
    def rows(*chunks: int) -> tuple[PackRow, ...]:
        return tuple(PackRow(chunk=chunk, row=0, prompt_tokens=1, response_tokens=1) for chunk in chunks)

    schedule = Schedule(
        ranks=(
            RankSchedule(
                packs=(rows(3, 0), rows(0)), pack_tokens=4, total_rows=4, total_sequences=4, total_response_tokens=4
            ),
            RankSchedule(packs=(rows(2), ()), pack_tokens=4, total_rows=4, total_sequences=4, total_response_tokens=4),
        )
    )
    layout = Layout(tp=2, dp=2, pp=2)  # ranks 4 and 5: replica 0's last stage; 6 and 7: replica 1's
    assert chunks_by_rank(schedule, layout) == [(), (), (), (), (0, 3), (), (2,), ()]
