"""What a penalty for moving away needs, and which of its settings have no effect without another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megarl.config.problems import Problem
from megarl.config.rules.placement import placed
from megarl.config.rules.unused import unused
from megarl.config.schema import Algo, Group, TrainingRun

Groups = Mapping[str, Group]


def penalty_has_a_reference(algo: Algo, groups: Groups) -> Iterator[Problem]:
    """A penalty needs a reference, and a reference without a penalty would run for nothing."""
    reference = placed(groups, "reference")
    if algo.kl.coef > 0 and not reference:
        fix = "add reference to the roles of a group, or set algo.kl.coef to 0"
        yield Problem(field="algo.kl.coef", value=str(algo.kl.coef), rule="needs the role reference", fix=fix)
    if algo.kl.coef == 0 and reference:
        fix = "remove the role reference from its group, or set algo.kl.coef above 0"
        rule = "above 0 where the role reference is placed; it has no effect otherwise"
        yield Problem(field="algo.kl.coef", value="0", rule=rule, fix=fix)


def penalty_is_one(algo: Algo) -> Iterator[Problem]:
    """What a penalty is like means nothing without one, and the controller's settings nothing without its target."""
    kl = algo.kl
    if kl.coef == 0:
        names = ("placement", "estimator", "target", "horizon", "unit", "cumulative", "importance", "reference_sync")
        yield from unused("algo.kl", kl, names, "with algo.kl.coef = 0", "or set the coefficient above 0")
        return
    if kl.target is None:
        yield from unused("algo.kl", kl, ("horizon", "unit"), "without algo.kl.target", "or set a target")
    if kl.placement == "loss":
        yield from unused("algo.kl", kl, ("cumulative",), "with algo.kl.in = loss", "or set algo.kl.in to reward")
    elif algo.of_tokens:
        where = f"with advantage {algo.advantage.name}, which adds up rewards by itself"
        yield from unused("algo.kl", kl, ("cumulative",), where, "or choose a comparison of samples, such as rloo")
    if kl.placement == "reward":
        yield from unused("algo.kl", kl, ("importance",), "with algo.kl.in = reward", "or set algo.kl.in to loss")
    elif kl.of_distributions:
        where = "with algo.kl.estimator = full, which is no estimate from samples"
        yield from unused("algo.kl", kl, ("importance",), where, "or set algo.kl.estimator to k3")


def estimators_fit_their_place(algo: Algo) -> Iterator[Problem]:
    """In the loss the gradient counts, in the reward the value."""
    kl, field = algo.kl, "algo.kl.estimator"
    if kl.coef == 0:
        return
    name = kl.estimator.name
    if kl.placement == "loss" and name == "k1":
        # The gradient of k1 has mean 0 over the policy's own tokens: as a loss it adds noise and no penalty.
        rule = "k2, k3, k1+, k3+, abs or full with algo.kl.in = loss, where the gradient of k1 is 0 on average"
        fix = "set it to k3 or k1+, or set algo.kl.in to reward"
        yield Problem(field=field, value=name, rule=rule, fix=fix)
    if kl.placement == "reward" and name == "full":
        rule = "of the sampled token with algo.kl.in = reward; full needs the whole distribution"
        yield Problem(field=field, value=name, rule=rule, fix="set it to k1, or set algo.kl.in to loss")
    if kl.placement == "reward" and name.endswith("+"):
        rule = f"without + with algo.kl.in = reward: {name} differs from {name[:-1]} in its gradient alone"
        yield Problem(field=field, value=name, rule=rule, fix=f"set it to {name[:-1]}, or set algo.kl.in to loss")


def references_share_the_actors_ranks(algo: Algo, groups: Groups) -> Iterator[Problem]:
    """Where actor and reference look at each other's weights or states, each rank has the same part of both."""
    kl = algo.kl
    if kl.coef > 0 and kl.reference_sync is not None:
        where, fix = "with algo.kl.reference_sync", "set algo.kl.reference_sync to null"
    elif kl.of_distributions:
        where, fix = "with algo.kl.estimator = full", "set algo.kl.estimator to k3"
    else:
        return
    for name, group in groups.items():
        if "reference" not in group.roles:
            continue
        field = f"groups.{name}.roles.reference"
        if "actor" not in group.roles:
            rule = f"in the group of the actor {where}"
            yield Problem(field=field, value=f"in {name}", rule=rule, fix=f"place it in the actor's group, or {fix}")
            continue
        sizes = ("tp", "pp", "vpp", "ep", "sequence_parallel")
        actor, reference = ({size: getattr(group.roles[of], size) for size in sizes} for of in ("actor", "reference"))
        if actor != reference:
            layout, value = (", ".join(f"{size} {of[size]}" for size in sizes) for of in (actor, reference))
            rule = f"the actor's layout ({layout}) {where}"
            yield Problem(field=field, value=value, rule=rule, fix=f"give both the same layout, or {fix}")


def references_follow_in_time(algo: Algo, run: TrainingRun) -> Iterator[Problem]:
    """The reference moves before the last step, after which nothing looks at it."""
    sync = algo.kl.reference_sync
    if algo.kl.coef > 0 and sync is not None and sync.every >= run.steps:
        rule = f"below run.steps = {run.steps}: the reference would not move before the last step"
        fix = "lower it, raise run.steps, or set algo.kl.reference_sync to null"
        yield Problem(field="algo.kl.reference_sync.every", value=str(sync.every), rule=rule, fix=fix)


RULES = (
    penalty_has_a_reference,
    penalty_is_one,
    estimators_fit_their_place,
    references_share_the_actors_ranks,
    references_follow_in_time,
)
