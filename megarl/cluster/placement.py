"""Devices as places for processes: one bundle of a Ray placement group per node."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.cluster import ray_api
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
        bundle: of the placement group, which has all devices of the node.
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
        devices_per_node: devices of each; a node of the cluster may have more.
        virtual: all nodes are on this machine; otherwise each is another node of the cluster.

    Raises:
        RunError: the cluster has too few nodes with so many free devices.
    """

    def __init__(self, nodes: int, devices_per_node: int, *, virtual: bool) -> None:
        self._group: PlacementGroup = placement_group(
            [{DEVICE: devices_per_node}] * nodes, strategy="STRICT_PACK" if virtual else "STRICT_SPREAD"
        )
        if not self._group.wait(_WAIT_S):
            raise RunError(
                f"the run needs {nodes} x {devices_per_node} devices, and the nodes of the cluster offer {_offer()}: "
                f"start every node with ray start --resources '{{\"{DEVICE}\": {devices_per_node}}}', wait for the "
                "runs that hold devices, or lower cluster.nodes or cluster.devices_per_node"
            )
        hosts = ray_api.nodes_of(self._group)
        self.slots: tuple[Slot, ...] = tuple(
            Slot(device=node * devices_per_node + local, node=node, local=local, bundle=bundle)
            for node, bundle in enumerate(in_order(hosts, _numbers()))
            for local in range(devices_per_node)
        )

    def strategy(self, device: int) -> PlacementGroupSchedulingStrategy:
        """Where Ray must start a process of this device."""
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=self.slots[device].bundle)


def in_order(hosts: Mapping[int, str], numbers: Mapping[str, int]) -> list[int]:
    """The bundles in the order of the run's nodes.

    Args:
        hosts: the node of each bundle.
        numbers: of the nodes that have one; the others come after them, in the order of their bundles.
    """
    return sorted(hosts, key=lambda bundle: (numbers.get(hosts[bundle], math.inf), bundle))


def _offer() -> str:
    """The devices of the living nodes, and how many of them nobody holds."""
    found = ((node["NodeName"], int(node["Resources"].get(DEVICE, 0))) for node in ray_api.living_nodes())
    free = int(ray_api.free_resources().get(DEVICE, 0))
    return f"{', '.join(f'{name}: {count}' for name, count in sorted(found))}, of which {free} are free"


def _numbers() -> dict[str, int]:
    """The number in the run of each node that was started with one."""
    labels = {node["NodeID"]: node["Labels"] for node in ray_api.living_nodes()}
    return {node: int(own[NODE_LABEL]) for node, own in labels.items() if NODE_LABEL in own}


def visible_devices(local: Sequence[int], inherited: str | None) -> str:
    """CUDA_VISIBLE_DEVICES for a process on these devices of its node.

    Args:
        local: numbers on the node.
        inherited: the node's own setting, which they index; None counts all GPUs of the machine.
    """
    names = inherited.split(",") if inherited else None
    return ",".join(names[i] if names else str(i) for i in local)
