"""Rules of an algorithm: advantages, their normalisation, losses, the KL penalty and corrections."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.problems import Broken, ineffective_settings, shown
from megarl.config.rules.placement_rules import placed, roles_of
from megarl.config.schema import (
    Actor,
    Algo,
    Critic,
    CustomAdvantage,
    CustomFunction,
    DirectReference,
    Groups,
    PromptData,
    Reference,
    Reject,
    TrainingRun,
)
from megarl.types import RoleName


def advantages_have_their_critic(algo: Algo, groups: Groups, critic: Critic | None) -> Iterator[Broken]:
    """A critic is there exactly for advantages with values; a function of your own on tokens may have one."""
    name = algo.advantage.name
    given = placed(groups, "critic")
    if algo.needs_critic:
        if not given:
            fix = "add critic to the roles of a group, or choose an advantage without one, such as grpo"
            yield "algo.advantage", "needs the role critic", fix
        if critic is None:
            fix = "add the section critic with an optimizer, or choose an advantage without one, such as grpo"
            yield "critic", f"advantage {name} needs the section critic", fix
        return
    may_read_values = isinstance(algo.advantage, CustomAdvantage) and algo.advantage.level == "token"
    if may_read_values and given == (critic is not None):
        return
    for field, _, role, _ in roles_of(groups):
        if role == "critic":
            fix = f"remove it: {field}=null, or choose gae"
            yield field, f"advantage {name} has no critic", fix
    if critic is not None:
        fix = "remove it: critic=null, or choose gae"
        yield "critic", f"has no effect with advantage {name}", fix


def values_have_a_critic(algo: Algo, critic: Critic | None) -> Iterator[Broken]:
    """A policy loss that reads values needs a critic."""
    if critic is None and isinstance(algo.policy_loss, CustomFunction) and "values" in algo.loss_reads:
        fix = "choose an advantage with a critic, such as gae, or a loss that does not read values"
        yield "algo.policy_loss.name", "reads values: needs a critic", fix


def groups_of_samples_are_compared(algo: Algo, data: PromptData) -> Iterator[Broken]:
    """Advantages of groups need several samples of a prompt."""
    name = algo.advantage.name
    if algo.from_token_rewards or isinstance(algo.advantage, CustomFunction) or name in ("remax", "none"):
        return
    needed = 2
    reason = "which compares the samples of a prompt"
    if name == "rloo_std":
        needed = 3
        reason = "which takes the deviation of the others"
    if data.samples_per_prompt < needed:
        rule = f"at least {needed} with advantage {name}, {reason}"
        yield "data.samples_per_prompt", rule, f"set it to {needed} or more"


def responses_weigh_alike(algo: Algo) -> Iterator[Broken]:
    """gspo and gmpo put the loss of a whole response on each of its tokens: the mean is over responses."""
    loss = algo.policy_loss.name
    aggregation = algo.aggregation
    other = aggregation.name != "sequence_mean" and not isinstance(aggregation, CustomFunction)
    if loss in ("gspo", "gmpo") and other:
        rule = f"sequence_mean with policy loss {loss}, which is of whole responses: others weigh them by their length"
        yield "algo.aggregation", rule, "set it to sequence_mean"


def ratios_have_room(algo: Algo) -> Iterator[Broken]:
    """Bounds of the probability ratio are outside of the clip."""
    if algo.policy_loss.name != "ppo":
        return
    options = algo.policy_loss.options
    delta = options["delta"]
    ratio_clamp = options["ratio_clamp"]
    lowest = 1 - options["clip"]
    highest = 1 + options["clip"]
    if options["clip_high"] is not None:
        highest = 1 + options["clip_high"]
    if delta is not None and delta <= highest:
        rule = f"above 1 + clip_high = {highest:g}, where the other branch ends"
        yield "algo.policy_loss.delta", rule, "raise it, or set it to null"
    if ratio_clamp is not None and not (ratio_clamp[0] <= lowest and highest <= ratio_clamp[1]):
        rule = f"must contain the interval of the clip, [{lowest:g}, {highest:g}]"
        yield "algo.policy_loss.ratio_clamp", rule, "widen it, or set it to null"


def penalty_has_a_reference(algo: Algo, groups: Groups) -> Iterator[Broken]:
    """A KL penalty needs a reference, and a reference needs a penalty, or a loss that reads it."""
    reference = placed(groups, "reference")
    if isinstance(algo.policy_loss, CustomFunction) and "ref_logprobs" in algo.loss_reads:
        if not reference:
            fix = "add reference to the roles of a group"
            yield "algo.policy_loss.name", "reads ref_logprobs: needs a reference", fix
        return
    if algo.kl.coef > 0 and not reference:
        fix = "add reference to the roles of a group, or set algo.kl.coef to 0"
        yield "algo.kl.coef", "needs the role reference", fix
    if algo.kl.coef == 0 and reference:
        fix = "remove the role reference from its group, or set algo.kl.coef above 0"
        rule = "above 0 where the role reference is placed; it has no effect otherwise"
        yield "algo.kl.coef", rule, fix


def penalties_act(algo: Algo) -> Iterator[Broken]:
    """A penalty's place and estimator need a coefficient."""
    kl = algo.kl
    if kl.coef == 0 and "coef" not in kl.model_fields_set:  # a coefficient of 0 turns the penalty of a recipe off
        names = ("placement", "estimator")
        yield from ineffective_settings("algo.kl", kl, names, "with algo.kl.coef = 0", "or raise algo.kl.coef")


def references_share_the_actors_ranks(algo: Algo, groups: Groups) -> Iterator[Broken]:
    """A reference whose weights or distributions are compared with the actor's is on the same ranks."""
    kl = algo.kl
    if kl.coef > 0 and kl.reference_sync is not None:
        where = "with algo.kl.reference_sync"
        fix = "set algo.kl.reference_sync to null"
    elif kl.reads_distributions:
        where = "with algo.kl.estimator = full"
        fix = "set algo.kl.estimator to k3"
    else:
        return
    yield from _shares_the_actors_ranks(groups, where, fix)


def references_are_the_actor_without_adapters(
    actor: Actor, reference: Reference | DirectReference | None, groups: Groups, algo: Algo | None
) -> Iterator[Broken]:
    """With adapters, the reference is the actor without them, and does not move."""
    if actor.lora is None or (isinstance(reference, Reference) and reference.directories):
        return
    fix = "set actor.lora to null"
    yield from _shares_the_actors_ranks(groups, "with actor.lora: it is the actor without its adapters", fix)
    if algo is not None and algo.kl.reference_sync is not None:
        rule = "null with actor.lora: the reference is the actor without its adapters"
        yield "algo.kl.reference_sync", rule, f"set it to null, or {fix}"


def critics_share_frozen_weights(actor: Actor, critic: Critic, groups: Groups) -> Iterator[Broken]:
    """A critic shares weights that nothing trains, from which it starts, on the ranks that have them."""
    field = "critic.shares_base"
    if not critic.shares_base:
        return
    if actor.lora is None or critic.lora is None:
        yield field, "false without actor.lora and critic.lora: both train the weights", "give both, or set it to false"
    if critic.path is not None:
        yield field, "false with critic.path, whose weights are others", "set it to false, or critic.path to null"
    yield from _shares_the_actors_ranks(groups, f"with {field}", f"set {field} to false", "critic")


def _shares_the_actors_ranks(
    groups: Groups,
    where: str,
    fix: str,
    sharing: RoleName = "reference",
) -> Iterator[Broken]:
    for field, group, name, role in roles_of(groups):
        if name != sharing:
            continue
        if "actor" not in group.roles:
            fix = f"place it in the actor's group, or {fix}"
            yield field, f"in the group of the actor {where}", fix
            continue
        for size in ("tp", "pp", "vpp", "ep", "sequence_parallel"):
            needed = getattr(group.roles["actor"], size)
            if getattr(role, size) != needed:
                rule = f"{shown(needed)} as of the actor {where}"
                yield f"{field}.{size}", rule, f"give both the same layout, or {fix}"


def teachers_stay(algo: Algo, reference: Reference, groups: Groups) -> Iterator[Broken]:
    """A teacher has a role, and keeps its weights."""
    if not reference.directories:
        return
    field = "reference.teachers" if reference.teachers else "reference.path"
    if not placed(groups, "reference"):
        fix = f"add reference to the roles of a group, or remove {field}"
        yield field, "has an effect with the role reference in a group alone", fix
    if algo.kl.reference_sync is not None:
        rule = f"null with {field}, whose weights are another model's"
        yield "algo.kl.reference_sync", rule, f"set it to null, or remove {field}"


def teachers_have_a_column(algo: Algo, reference: Reference, data: PromptData) -> Iterator[Broken]:
    """Several teachers need a column that names each prompt's, and no divergence of distributions."""
    if not reference.teachers:
        if reference.column is not None:
            rule = "has an effect with reference.teachers alone"
            yield "reference.column", rule, "remove it, or name the teachers"
        return
    if reference.path is not None:
        yield "reference.path", "null with reference.teachers", "make it one of the teachers"
    if reference.column is None:
        rule = "the column of a row with its teacher's name, with reference.teachers"
        yield "reference.column", rule, "name it"
    if data.prompts is None:
        rule = "needs data.prompts, whose rows name the teachers"
        yield "reference.teachers", rule, "give data.prompts, or one teacher as reference.path"
    if algo.kl.reads_distributions:
        rule = "none with algo.kl.estimator = full, whose update has one teacher"
        yield "reference.teachers", rule, "set algo.kl.estimator to k1, or give reference.path"


def references_follow_in_time(algo: Algo, run: TrainingRun) -> Iterator[Broken]:
    """The reference is updated before the last step."""
    sync = algo.kl.reference_sync
    if algo.kl.coef > 0 and sync is not None and run.steps is not None and sync.every >= run.steps:
        rule = f"below run.steps = {run.steps}: the reference would not move before the last step"
        fix = f"lower it, raise {run.length_field}, or set algo.kl.reference_sync to null"
        yield "algo.kl.reference_sync.every", rule, fix


def bounds_are_in_order(field: str, reject: Reject) -> Iterator[Broken]:
    """A lower bound is below the upper one, and only k1 has one."""
    is_k1 = reject.statistic.endswith("k1")
    if reject.lower is not None and not is_k1:
        rule = f"for k1 alone; {reject.statistic} is never negative"
        yield f"{field}.lower", rule, "remove it"
    elif reject.lower is not None and reject.lower >= reject.upper:
        rule = f"below {field}.upper = {shown(reject.upper)}"
        yield f"{field}.lower", rule, f"lower it, or raise {field}.upper"
    elif is_k1 and reject.upper <= 1:
        rule = "above 1, or with a lower bound: the usual one is 1 / upper"
        yield f"{field}.upper", rule, "raise it, or give lower"
