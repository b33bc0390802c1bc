"""How the weights get from the actor into the engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megarl.config.devices import parse_devices
from megarl.config.problems import Problem
from megarl.config.schema import Cluster, Group, Resharding, Rollout


def transports_are_for_the_cpu(cluster: Cluster, resharding: Resharding) -> Iterator[Problem]:
    """GPUs have one way between each two places."""
    if cluster.device != "cpu" and resharding.transport != "auto":
        yield Problem(
            field="resharding.transport",
            value=resharding.transport,
            rule=f"auto where cluster.device is {cluster.device}",
            fix="set it to auto",
        )


def shared_memory_stays_within_a_node(
    cluster: Cluster, groups: Mapping[str, Group], rollout: Rollout, resharding: Resharding
) -> Iterator[Problem]:
    """The actor and all engines are on one node where they share memory."""
    if resharding.transport != "shared_memory":
        return
    devices = [device for group in groups.values() if "actor" in group.roles for device in parse_devices(group.devices)]
    nodes = {device // cluster.devices_per_node for device in (*devices, *parse_devices(rollout.devices))}
    if len(nodes) > 1:
        yield Problem(
            field="resharding.transport",
            value="shared_memory",
            rule=f"within a node; actor and engines are on nodes {', '.join(map(str, sorted(nodes)))}",
            fix="set it to auto, which shares memory where it can, or to gloo",
        )


RULES = (transports_are_for_the_cpu, shared_memory_stays_within_a_node)
