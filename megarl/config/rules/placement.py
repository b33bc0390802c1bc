"""Which role runs on which devices, and how it is split over them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import get_args

from megarl.config.devices import parse_devices
from megarl.config.problems import Problem
from megarl.config.schema import Cluster, Group, RoleConfig, Rollout
from megarl.types import RoleName

Groups = Mapping[str, Group]


def roles_of(groups: Groups) -> Iterator[tuple[str, Group, RoleName, RoleConfig]]:
    """Every placed role as (its field's path, its group, its name, its settings)."""
    for name, group in groups.items():
        for role, settings in group.roles.items():
            yield f"groups.{name}.roles.{role}", group, role, settings


def groups_have_roles(groups: Groups) -> Iterator[Problem]:
    """A group without roles would start processes for nothing."""
    for name, group in groups.items():
        if not group.roles:
            fix = f"give it a role, or remove it with groups.{name}=null"
            yield Problem(field=f"groups.{name}.roles", value="{}", rule="a group has at least one role", fix=fix)


def devices_exist(cluster: Cluster, groups: Groups, rollout: Rollout) -> Iterator[Problem]:
    """No device number reaches beyond the cluster."""
    total = cluster.nodes * cluster.devices_per_node
    fields = {f"groups.{name}.devices": group.devices for name, group in groups.items()}
    for field, devices in {**fields, "rollout.devices": rollout.devices}.items():
        highest = max(parse_devices(devices))
        if highest >= total:
            yield Problem(
                field=field,
                value=devices,
                rule=f"device numbers are below nodes * devices_per_node = {total}",
                fix=f"choose devices below {total}, or set cluster.devices_per_node to "
                f"{-(-(highest + 1) // cluster.nodes)} or more",
            )


def groups_are_disjoint(groups: Groups) -> Iterator[Problem]:
    """No two groups have a device in common."""
    owner: dict[int, str] = {}
    for name, group in groups.items():
        shared = {device: owner[device] for device in parse_devices(group.devices) if device in owner}
        if shared:
            others = ", ".join(sorted(set(shared.values())))
            yield Problem(
                field=f"groups.{name}.devices",
                value=group.devices,
                rule=f"groups have disjoint devices; {', '.join(map(str, shared))} also in {others}",
                fix="give the groups devices of their own, or put the roles into one group",
            )
        owner.update(dict.fromkeys(parse_devices(group.devices), name))


def roles_placed_once(groups: Groups) -> Iterator[Problem]:
    """The actor is placed, and no role is placed twice."""
    for role in get_args(RoleName):
        places = [name for name, group in groups.items() if role in group.roles]
        if len(places) > 1:
            yield Problem(
                field=f"groups.{places[-1]}.roles.{role}",
                value=f"in {' and '.join(places)}",
                rule="a role is in exactly one group",
                fix=f"remove it from the others, for example groups.{places[0]}.roles.{role}=null",
            )
        if not places and role == "actor":
            fix = "add it to the roles of a group"
            yield Problem(field="groups", value=", ".join(groups), rule="a group has the role actor", fix=fix)


def layouts_fill_groups(groups: Groups) -> Iterator[Problem]:
    """Whole replicas fill a group's devices."""
    for field, group, _, role in roles_of(groups):
        count = len(parse_devices(group.devices))
        if count % (role.tp * role.pp):
            yield Problem(
                field=field,
                value=f"tp {role.tp}, pp {role.pp}",
                rule=f"tp * pp = {role.tp * role.pp} divides the group's {count} devices",
                fix=f"change tp or pp so that the product divides {count}, or change the group's devices",
            )


def interleaving_needs_stages(groups: Groups) -> Iterator[Problem]:
    """Several model chunks per stage make sense in a pipeline alone."""
    for field, _, _, role in roles_of(groups):
        if role.vpp > 1 and role.pp < 2:
            fix = "set pp to 2 or more, or vpp to 1"
            yield Problem(field=f"{field}.vpp", value=str(role.vpp), rule="vpp above 1 needs pp of 2 or more", fix=fix)


def sequence_parallel_needs_tp(groups: Groups) -> Iterator[Problem]:
    """Sequence parallelism is between tensor-parallel ranks."""
    for field, _, _, role in roles_of(groups):
        if role.sequence_parallel and role.tp == 1:
            yield Problem(
                field=f"{field}.sequence_parallel",
                value="True",
                rule="has an effect with tp above 1 alone",
                fix="set it to false, or tp to 2 or more",
            )


def engines_fill_devices(cluster: Cluster, rollout: Rollout) -> Iterator[Problem]:
    """Whole engines fill the rollout devices, each within a node."""
    devices = parse_devices(rollout.devices)
    if len(devices) % rollout.tp:
        yield Problem(
            field="rollout.tp",
            value=str(rollout.tp),
            rule=f"divides the {len(devices)} rollout devices ({rollout.devices})",
            fix=f"choose a divisor of {len(devices)}, or change rollout.devices",
        )
        return
    for first in range(0, len(devices), rollout.tp):
        engine = devices[first : first + rollout.tp]
        if len({device // cluster.devices_per_node for device in engine}) > 1:
            yield Problem(
                field="rollout.devices",
                value=rollout.devices,
                rule=f"an engine stays within a node; one would have devices {', '.join(map(str, engine))}",
                fix=f"list {rollout.tp} devices of one node for each engine",
            )


def nodes_are_joined(cluster: Cluster) -> Iterator[Problem]:
    """A Ray that is started here has this machine's GPUs alone."""
    if cluster.nodes > 1 and cluster.device == "cuda" and cluster.address is None:
        yield Problem(
            field="cluster.nodes",
            value=str(cluster.nodes),
            rule="several nodes of GPUs need cluster.address",
            fix="start Ray on every node and set cluster.address, or set cluster.nodes=1",
        )


RULES = (
    nodes_are_joined,
    groups_have_roles,
    devices_exist,
    groups_are_disjoint,
    roles_placed_once,
    layouts_fill_groups,
    interleaving_needs_stages,
    sequence_parallel_needs_tp,
    engines_fill_devices,
)
