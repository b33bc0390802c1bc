"""Devices as places for processes: one bundle of a Ray placement group per device."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.cluster.ray_node import DEVICE, NODE_LABEL
from megarl.errors import RunError

_WAIT_S = 60


@dataclass(frozen=True, kw_only=True)
class Slot:
    """The place of one device.

    Args:
        device: its number over all nodes.
        node: its node, virtual or not.
        local: its number on the node.
        bundle: of the placement group.
    """

    device: int
    node: int
    local: int
    bundle: int


class Placement:
    """All devices of a run, reserved at once.

    A process takes a place and no share of it, so that a trainer and an engine may stand on one device;
    that groups do not overlap is the configuration's rule.

    Args:
        nodes: nodes of the run.
        devices_per_node: devices of each.
        virtual: all nodes are on this machine.

    Raises:
        RunError: the cluster has too few devices, or spreads them unevenly.
    """

    def __init__(self, nodes: int, devices_per_node: int, *, virtual: bool) -> None:
        count = nodes * devices_per_node
        self._group: PlacementGroup = placement_group([{DEVICE: 1}] * count, strategy="PACK")
        if not self._group.wait(_WAIT_S):
            offered = int(ray.cluster_resources().get(DEVICE, 0))
            raise RunError(
                f"the run needs {count} devices and the cluster offers {offered}: start every node with "
                f"ray start --resources '{{\"{DEVICE}\": {devices_per_node}}}'"
            )
        hosts: dict[int, str] = placement_group_table(self._group)["bundles_to_node_id"]
        bundles = list(range(count)) if virtual else bundles_by_node(hosts, devices_per_node, _numbers())
        self.slots: tuple[Slot, ...] = tuple(
            Slot(device=i, node=i // devices_per_node, local=i % devices_per_node, bundle=bundle)
            for i, bundle in enumerate(bundles)
        )

    def strategy(self, device: int) -> PlacementGroupSchedulingStrategy:
        """Where Ray must start a process of this device."""
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=self.slots[device].bundle)


def bundles_by_node(hosts: Mapping[int, str], devices_per_node: int, numbers: Mapping[str, int]) -> list[int]:
    """The bundles in the order of devices: those of one node side by side.

    Args:
        hosts: the node of each bundle.
        devices_per_node: bundles that each node must have.
        numbers: of the nodes that have one; the others come after them, in the order of their bundles.

    Raises:
        RuntimeError: a node has another number of them.
    """
    found = dict.fromkeys(hosts[bundle] for bundle in sorted(hosts))
    nodes = {node: index for index, node in enumerate(sorted(found, key=lambda node: numbers.get(node, math.inf)))}
    uneven = [count for count in Counter(hosts.values()).values() if count != devices_per_node]
    if uneven:
        raise RuntimeError(
            f"cluster.devices_per_node is {devices_per_node}, and Ray placed {uneven[0]} devices of the run on a node: "
            f"give every node devices_per_node devices"
        )
    return sorted(hosts, key=lambda bundle: (nodes[hosts[bundle]], bundle))


def _numbers() -> dict[str, int]:
    """The number in the run of each node that was started with one."""
    labels = {node["NodeID"]: node["Labels"] for node in ray.nodes() if node["Alive"]}
    return {node: int(own[NODE_LABEL]) for node, own in labels.items() if NODE_LABEL in own}


def visible_devices(local: Sequence[int], inherited: str | None) -> str:
    """CUDA_VISIBLE_DEVICES for a process on these devices of its node.

    Args:
        local: numbers on the node.
        inherited: the node's own setting, which they index; None counts all GPUs of the machine.
    """
    names = inherited.split(",") if inherited else None
    return ",".join(names[i] if names else str(i) for i in local)
