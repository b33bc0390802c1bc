"""Rules of roles and their devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import get_args

from megarl.config.problems import Problem
from megarl.config.schema import STAGES, Cluster, Group, RoleConfig, Rollout
from megarl.config.schema.base import parse_devices
from megarl.types import RoleName

Groups = Mapping[str, Group]

STAGE_ROLES: Mapping[str, tuple[RoleName, ...]] = {
    "sft": ("actor",),
    "reward_model": ("reward",),
    "ppo": ("actor", "critic", "reference", "reward"),
    "raft": ("actor", "reward"),
    "eval": ("reward",),
}
"""The roles that a stage may have."""

NEEDED_ROLE: Mapping[str, RoleName] = {"sft": "actor", "reward_model": "reward", "ppo": "actor", "raft": "actor"}
"""The role that a stage must have."""


def roles_of(groups: Groups) -> Iterator[tuple[str, Group, RoleName, RoleConfig]]:
    """Every placed role as (its field's path, its group, its name, its settings)."""
    for name, group in groups.items():
        for role, settings in group.roles.items():
            yield f"groups.{name}.roles.{role}", group, role, settings


def placed(groups: Groups, role: RoleName) -> bool:
    """Whether a group has the role."""
    return any(role in group.roles for group in groups.values())


def groups_have_roles(groups: Groups) -> Iterator[Problem]:
    """A group without roles would start processes for nothing."""
    for name, group in groups.items():
        if not group.roles:
            fix = f"give it a role, or remove it with groups.{name}=null"
            yield Problem(f"groups.{name}.roles", "{}", "a group has at least one role", fix)


def devices_exist(cluster: Cluster, groups: Groups) -> Iterator[Problem]:
    """No device number of a group reaches beyond the cluster."""
    for name, group in groups.items():
        yield from beyond_the_cluster(cluster, f"groups.{name}.devices", group.devices)


def beyond_the_cluster(cluster: Cluster, field: str, devices: str) -> Iterator[Problem]:
    """A list of devices of which one does not exist."""
    total = cluster.nodes * cluster.devices_per_node
    highest = max(parse_devices(devices))
    if highest >= total:
        enough = -(-(highest + 1) // cluster.nodes)
        yield Problem(
            field,
            devices,
            f"device numbers are below nodes * devices_per_node = {total}",
            f"choose devices below {total}, or set cluster.devices_per_node to {enough} or more",
        )


def groups_are_disjoint(groups: Groups) -> Iterator[Problem]:
    """No two groups have a device in common."""
    owner: dict[int, str] = {}
    for name, group in groups.items():
        shared = {device: owner[device] for device in parse_devices(group.devices) if device in owner}
        if shared:
            others = ", ".join(sorted(set(shared.values())))
            yield Problem(
                f"groups.{name}.devices",
                group.devices,
                f"groups have disjoint devices; {', '.join(map(str, shared))} also in {others}",
                "give the groups devices of their own, or put the roles into one group",
            )
        owner.update(dict.fromkeys(parse_devices(group.devices), name))


def roles_belong_to_the_stage(stage: str, groups: Groups) -> Iterator[Problem]:
    """The stage's own role is placed, and no role that the stage does not use."""
    known, needed = STAGE_ROLES[stage], NEEDED_ROLE.get(stage)
    for field, _, role, _ in roles_of(groups):
        if role not in known:
            rule = f"stage {stage} has the roles {', '.join(known)} alone"
            yield Problem(field, role, rule, f"remove it: {field}=null")
    if needed is not None and not placed(groups, needed):
        fix = "add it to the roles of a group"
        yield Problem("groups", ", ".join(groups), f"a group has the role {needed}", fix)


def roles_placed_once(groups: Groups) -> Iterator[Problem]:
    """No role is placed twice."""
    for role in get_args(RoleName):
        places = [name for name, group in groups.items() if role in group.roles]
        if len(places) > 1:
            yield Problem(
                f"groups.{places[-1]}.roles.{role}",
                f"in {' and '.join(places)}",
                "a role is in exactly one group",
                f"remove it from the others, for example groups.{places[0]}.roles.{role}=null",
            )


def layouts_fill_groups(groups: Groups) -> Iterator[Problem]:
    """Whole replicas fill a group's devices."""
    for field, group, _, role in roles_of(groups):
        count = len(parse_devices(group.devices))
        if count % (role.tp * role.pp):
            yield Problem(
                field,
                f"tp {role.tp}, pp {role.pp}",
                f"tp * pp = {role.tp * role.pp} divides the group's {count} devices",
                f"change tp or pp so that the product divides {count}, or change the group's devices",
            )


def experts_divide_replicas(groups: Groups) -> Iterator[Problem]:
    """Replicas share the experts in sets of equal size."""
    for field, group, _, role in roles_of(groups):
        replicas, rest = divmod(len(parse_devices(group.devices)), role.tp * role.pp)
        if not rest and replicas % role.ep:
            yield Problem(
                f"{field}.ep",
                str(role.ep),
                f"ep divides the role's {replicas} replicas (devices / (tp * pp))",
                f"choose a divisor of {replicas}, or change tp, pp or the group's devices",
            )


def interleaving_needs_stages(groups: Groups) -> Iterator[Problem]:
    """Several model chunks per stage make sense in a pipeline alone."""
    for field, _, _, role in roles_of(groups):
        if role.vpp > 1 and role.pp < 2:
            fix = "set pp to 2 or more, or vpp to 1"
            yield Problem(f"{field}.vpp", str(role.vpp), "vpp above 1 needs pp of 2 or more", fix)


def sequence_parallel_needs_tp(groups: Groups) -> Iterator[Problem]:
    """Sequence parallelism is between tensor-parallel ranks."""
    for field, _, _, role in roles_of(groups):
        if role.sequence_parallel and role.tp == 1:
            yield Problem(
                f"{field}.sequence_parallel",
                "True",
                "has an effect with tp above 1 alone",
                "set it to false, or tp to 2 or more",
            )


def recomputation_is_for_a_backward_pass(stage: str, groups: Groups) -> Iterator[Problem]:
    """A role that is not trained keeps no activations."""
    trained = STAGES[stage].trained
    for field, _, name, role in roles_of(groups):
        if role.recompute != "none" and name not in trained:
            rule = f"has an effect on roles in training alone ({', '.join(trained) or 'none'})"
            yield Problem(f"{field}.recompute", role.recompute, rule, "set it to none")


def offloading_frees_devices(groups: Groups, rollout: Rollout | None) -> Iterator[Problem]:
    """A role makes room for another one of its group, or for an engine."""
    engines = set(parse_devices(rollout.devices)) if rollout is not None else set[int]()
    for field, group, _, role in roles_of(groups):
        if role.offload and len(group.roles) == 1 and not engines & set(parse_devices(group.devices)):
            yield Problem(
                f"{field}.offload",
                "True",
                "has an effect where another role or an engine has the same devices",
                "set it to false",
            )


def nodes_are_joined(cluster: Cluster) -> Iterator[Problem]:
    """A Ray that is started here has this machine's GPUs alone."""
    if cluster.nodes > 1 and cluster.device == "cuda" and cluster.address is None:
        yield Problem(
            "cluster.nodes",
            str(cluster.nodes),
            "several nodes of GPUs need cluster.address",
            "start it with megarl launch slurm or ray, or join a running Ray with cluster.address",
        )


RULES = (
    nodes_are_joined,
    groups_have_roles,
    devices_exist,
    groups_are_disjoint,
    roles_belong_to_the_stage,
    roles_placed_once,
    layouts_fill_groups,
    experts_divide_replicas,
    interleaving_needs_stages,
    sequence_parallel_needs_tp,
    recomputation_is_for_a_backward_pass,
    offloading_frees_devices,
)
