"""Rules of the run's directory, of roles and of their devices."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from megarl.config.problems import Broken, Problem
from megarl.config.schema import (
    Cluster,
    DirectReference,
    Group,
    Groups,
    Reference,
    Reward,
    RoleConfig,
    Rollout,
    Run,
    stage_class,
)
from megarl.config.schema.base import parse_devices
from megarl.types import RoleName


def roles_of(groups: Groups) -> Iterator[tuple[str, Group, RoleName, RoleConfig]]:
    """Yields every placed role as (path of its field, its group, its name, its settings)."""
    for name, group in groups.items():
        for role, settings in group.roles.items():
            yield f"groups.{name}.roles.{role}", group, role, settings


def placed(groups: Groups, role: RoleName) -> bool:
    return any(role in group.roles for group in groups.values())


def run_directories_can_be_made(run: Run) -> Iterator[Broken]:
    """run.dir is a directory or can be made; no parent is a file, or would be made for ``..``."""
    path = Path(run.dir)
    if run.dir.startswith("~"):
        rule = "a path in full: ~ is not read as a home directory"
        yield "run.dir", rule, "write the path in full; a shell fills in $HOME"
    for place in (*reversed(path.parents), path):
        if place.exists() and not place.is_dir():
            rule = f"a directory, or one that can be made; {place} is a file"
            yield "run.dir", rule, "choose another directory"
        if place.name == ".." and not place.parent.exists():
            rule = f"a directory that can be made; {place.parent}, before .., does not exist"
            yield "run.dir", rule, f"write {os.path.normpath(run.dir)}"
            return


def threads_are_used(cluster: Cluster) -> Iterator[Broken]:
    """A number of threads is for virtual devices."""
    for name, number in cluster.threads_per_device:
        if cluster.device == "cuda" and number not in (None, 1):
            fix = "remove it, or set it to auto"
            yield f"cluster.threads_per_device.{name}", "has no effect with device cuda", fix


def groups_have_roles(field: str, group: Group) -> Iterator[Broken]:
    """Every group has a role."""
    if not group.roles:
        fix = f"give it a role, or remove it with {field}=null"
        yield f"{field}.roles", "a group must have at least one role", fix


def engine_devices_exist(cluster: Cluster, rollout: Rollout) -> Iterator[Broken]:
    """The cluster has all devices of the engines."""
    yield from _devices_exist(cluster, "rollout.devices", rollout.devices)


def devices_exist(cluster: Cluster, groups: Groups) -> Iterator[Broken]:
    """The cluster has all devices of the groups."""
    for name, group in groups.items():
        yield from _devices_exist(cluster, f"groups.{name}.devices", group.devices)


def judges_have_devices(cluster: Cluster, groups: Groups, rollout: Rollout, reward: Reward) -> Iterator[Broken]:
    """The judge's engines fill devices of the cluster that nothing else has, and none spans nodes."""
    if reward.judge_model is None:
        return
    field = "reward.judge_model.devices"
    given = reward.judge_model.devices
    tp = reward.judge_model.tp
    yield from _devices_exist(cluster, field, given)
    devices = parse_devices(given)
    taken = set(parse_devices(rollout.devices))
    for group in groups.values():
        taken.update(parse_devices(group.devices))
    if shared := sorted(taken.intersection(devices)):
        rule = f"devices of their own; groups or engines have {', '.join(map(str, shared))}, too"
        yield field, rule, "choose others, and raise cluster.devices_per_node if needed"
    yield from tp_fills_devices("reward.judge_model", given, tp, cluster.devices_per_node)


def tp_fills_devices(section: str, given: str, tp: int, per_node: int) -> Iterator[Broken]:
    """`tp` divides the number of devices, and its devices are those of one node."""
    devices = parse_devices(given)
    if len(devices) % tp:
        rule = f"must divide the {len(devices)} devices of {section}.devices ({given})"
        fix = f"choose a divisor of {len(devices)}, or change {section}.devices"
        yield f"{section}.tp", rule, fix
        return
    for first in range(0, len(devices), tp):
        chosen = devices[first : first + tp]
        if len({device // per_node for device in chosen}) > 1:
            rule = f"an engine must stay within a node; one would have devices {', '.join(map(str, chosen))}"
            yield f"{section}.devices", rule, f"list {tp} devices of one node for each engine"


def _devices_exist(cluster: Cluster, field: str, devices: str) -> Iterator[Broken]:
    total = cluster.nodes * cluster.devices_per_node
    highest = max(parse_devices(devices))
    if highest >= total:
        enough = -(-(highest + 1) // cluster.nodes)
        fix = f"choose devices below {total}, or set cluster.devices_per_node to {enough} or more"
        yield field, f"device numbers must be below nodes * devices_per_node = {total}", fix


def groups_are_disjoint(groups: Groups) -> Iterator[Broken]:
    """Groups have no device in common."""
    owner: dict[int, str] = {}
    for name, group in groups.items():
        shared = {device: owner[device] for device in parse_devices(group.devices) if device in owner}
        if shared:
            others = ", ".join(sorted(set(shared.values())))
            rule = f"groups must have disjoint devices; {', '.join(map(str, shared))} also in {others}"
            fix = "give the groups devices of their own, or put the roles into one group"
            yield f"groups.{name}.devices", rule, fix
        owner.update(dict.fromkeys(parse_devices(group.devices), name))


def roles_belong_to_the_stage(stage: str, groups: Groups) -> Iterator[Broken]:
    """The role that the stage trains is placed, and no role that the stage does not use."""
    known = stage_class(stage).roles
    for field, _, role, _ in roles_of(groups):
        if role not in known:
            rule = f"the role must be one of those of stage {stage}: {', '.join(known)}"
            yield field, rule, f"remove it: {field}=null"
    if stage_class(stage).trained and not placed(groups, known[0]):
        rule = f"a group must have the role {known[0]}"
        yield Problem("groups", ", ".join(groups), rule, "add it to the roles of a group")


def roles_placed_once(groups: Groups) -> Iterator[Broken]:
    """No role is placed twice."""
    for role in get_args(RoleName):
        names = [name for name, group in groups.items() if role in group.roles]
        if len(names) > 1:
            field = f"groups.{names[-1]}.roles.{role}"
            value = f"in {' and '.join(names)}"
            fix = f"remove it from the others, for example groups.{names[0]}.roles.{role}=null"
            yield Problem(field, value, "a role must be in exactly one group", fix)


def layouts_fill_groups(groups: Groups) -> Iterator[Broken]:
    """tp * pp divides a group's devices, ep the replicas; vpp needs pp, sequence_parallel tp."""
    for field, group, _, role in roles_of(groups):
        devices = len(parse_devices(group.devices))
        size = role.tp * role.pp
        replicas = devices // size
        if devices % size:
            rule = f"tp * pp = {size} must divide the group's {devices} devices"
            fix = f"change tp or pp so that the product divides {devices}, or change the group's devices"
            yield Problem(field, f"tp {role.tp}, pp {role.pp}", rule, fix)
        elif replicas % role.ep:
            rule = f"ep must divide the role's {replicas} replicas (devices / (tp * pp))"
            fix = f"choose a divisor of {replicas}, or change tp, pp or the group's devices"
            yield f"{field}.ep", rule, fix
        if role.vpp > 1 and role.pp < 2:
            fix = "set pp to 2 or more, or vpp to 1"
            yield f"{field}.vpp", "vpp above 1 needs pp of 2 or more", fix
        if role.sequence_parallel and role.tp == 1:
            fix = "set it to false, or tp to 2 or more"
            yield f"{field}.sequence_parallel", "has an effect with tp above 1 alone", fix


def recomputation_is_for_a_backward_pass(stage: str, groups: Groups) -> Iterator[Broken]:
    """Only roles in training keep activations that could be recomputed."""
    trained = stage_class(stage).trained
    for field, _, name, role in roles_of(groups):
        if role.recompute != "none" and name not in trained:
            rule = f"has an effect on roles in training alone ({', '.join(trained) or 'none'})"
            yield f"{field}.recompute", rule, "set it to none"


def offloading_frees_devices(
    groups: Groups, rollout: Rollout | None, reference: Reference | DirectReference | None
) -> Iterator[Broken]:
    """A role is offloaded only where another model uses its devices."""
    take_turns = isinstance(reference, Reference) and len(reference.teachers) > 1
    engines: set[int] = set()
    if rollout is not None:
        engines.update(parse_devices(rollout.devices))
    for field, group, name, role in roles_of(groups):
        if name == "reference" and take_turns:
            continue
        if role.offload and len(group.roles) == 1 and not engines & set(parse_devices(group.devices)):
            rule = "has an effect where another role or an engine has the same devices"
            yield f"{field}.offload", rule, "set it to false"
