"""The placement of processes on devices: a Ray placement group with one bundle per node."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.cluster import ray_api
from megarl.cluster.ray_node import DEVICE, NODE_LABEL
from megarl.errors import RunError

_WAIT_S = 60


class MissingNodesError(RunError):
    """The cluster has too few nodes; `nodes` of them have enough devices, free or not."""

    def __init__(self, message: str, nodes: int) -> None:
        super().__init__(message)
        self.nodes = nodes


class Placement:
    """All devices of a run, reserved together.

    A process occupies no part of a device for Ray, so that a trainer and an engine can share one;
    the configuration decides what may overlap.

    Args:
        virtual: whether all nodes are on this machine; otherwise each is a node of the cluster.

    Raises:
        MissingNodesError: The cluster has too few nodes with so many free devices.
    """

    def __init__(self, nodes: int, devices_per_node: int, *, virtual: bool) -> None:
        strategy = "STRICT_PACK" if virtual else "STRICT_SPREAD"
        self._group: PlacementGroup = placement_group([{DEVICE: devices_per_node}] * nodes, strategy=strategy)
        if not self._group.wait(_WAIT_S):
            raise MissingNodesError(
                f"the run needs {nodes} x {devices_per_node} devices, and the nodes of the cluster offer {_offer()}: "
                f"start every node with ray start --resources '{{\"{DEVICE}\": {devices_per_node}}}', wait for the "
                "runs that hold devices, or lower cluster.nodes or cluster.devices_per_node",
                nodes=sum(count >= devices_per_node for _, count in _nodes()),
            )
        hosts = ray_api.untyped.util.placement_group_table(self._group)["bundles_to_node_id"]
        self._devices_per_node = devices_per_node
        self._bundles = order_bundles(hosts, _node_numbers())

    def strategy(self, device: int) -> PlacementGroupSchedulingStrategy:
        """Returns Ray's scheduling strategy for a process on this device."""
        bundle = self._bundles[device // self._devices_per_node]
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)


def order_bundles(hosts: Mapping[int, str], numbers: Mapping[str, int]) -> list[int]:
    """Returns the bundles in the order of the run's nodes; those on nodes without a number come last.

    Args:
        hosts: node id of each bundle.
        numbers: number in the run by node id.
    """
    return sorted(hosts, key=lambda bundle: (numbers.get(hosts[bundle], math.inf), bundle))


def _offer() -> str:
    """Describes the devices of the living nodes and how many of them are free."""
    free = int(ray_api.untyped.available_resources().get(DEVICE, 0))
    nodes = ", ".join(f"{name}: {count}" for name, count in _nodes())
    return f"{nodes}, of which {free} are free"


def _nodes() -> list[tuple[str, int]]:
    """Returns the name and the number of devices of each living node."""
    return sorted((node["NodeName"], int(node["Resources"].get(DEVICE, 0))) for node in ray_api.living_nodes())


def _node_numbers() -> dict[str, int]:
    """Returns the number in the run by node id, for nodes that were started with one."""
    numbers: dict[str, int] = {}
    for node in ray_api.living_nodes():
        if NODE_LABEL in node["Labels"]:
            numbers[node["NodeID"]] = int(node["Labels"][NODE_LABEL])
    return numbers


def visible_devices(local: Sequence[int], inherited: str | None) -> str:
    """Returns CUDA_VISIBLE_DEVICES of a process.

    Args:
        local: numbers of its devices on the node.
        inherited: the node's CUDA_VISIBLE_DEVICES, which `local` indexes; None for
            all GPUs of the machine.
    """
    if not inherited:
        return ",".join(map(str, local))
    names = inherited.split(",")
    return ",".join(names[number] for number in local)
