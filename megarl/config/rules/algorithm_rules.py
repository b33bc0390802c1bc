"""Rules of the parts of an algorithm: advantages, their normalisation, losses, penalties and corrections."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megarl.config.problems import Problem, ineffective_settings, shown
from megarl.config.rules.placement_rules import placed
from megarl.config.schema import Algo, Critic, CustomAdvantage, CustomFunction, Group, PromptData, Rollout, TrainingRun

Groups = Mapping[str, Group]


def advantages_have_their_critic(algo: Algo, groups: Groups, critic: Critic | None) -> Iterator[Problem]:
    """GAE needs values; what has no use for them has no critic."""
    name, given = algo.advantage.name, placed(groups, "critic")
    if algo.needs_critic:
        if not given:
            fix = "add critic to the roles of a group, or choose an advantage without one, such as grpo"
            yield Problem("algo.advantage", name, "needs the role critic", fix)
        if critic is None:
            fix = "add the section critic with an optimizer, or choose an advantage without one, such as grpo"
            yield Problem("critic", "null", f"advantage {name} needs the section critic", fix)
        return
    if (
        isinstance(algo.advantage, CustomAdvantage)
        and algo.advantage.level == "token"
        and given == (critic is not None)
    ):
        return  # it may read values, or not
    for group_name, group in groups.items():
        if "critic" in group.roles:
            field = f"groups.{group_name}.roles.critic"
            fix = f"remove it: {field}=null, or choose gae"
            yield Problem(field, "critic", f"advantage {name} has no critic", fix)
    if critic is not None:
        rule, fix = f"has no effect with advantage {name}", "remove it: critic=null, or choose gae"
        yield Problem("critic", "given", rule, fix)


def value_losses_have_a_critic(algo: Algo, critic: Critic | None) -> Iterator[Problem]:
    """Without a critic there is no loss of it."""
    if critic is None:
        yield from ineffective_settings("algo", algo, ("value_loss",), "without a critic", "or choose gae")


def groups_of_samples_are_compared(algo: Algo, data: PromptData) -> Iterator[Problem]:
    """A sample alone has no advantage over the others of its prompt."""
    name = algo.advantage.name
    if algo.of_tokens or isinstance(algo.advantage, CustomFunction) or name == "remax":
        return
    needed = 3 if name == "rloo_std" else 2
    if data.samples_per_prompt < needed:
        what = "which compares the samples of a prompt" if needed == 2 else "which takes the deviation of the others"
        rule = f"at least {needed} with advantage {name}, {what}"
        fix = f"set it to {needed} or more"
        yield Problem("data.samples_per_prompt", str(data.samples_per_prompt), rule, fix)


def samples_differ_from_the_likeliest(algo: Algo, rollout: Rollout) -> Iterator[Problem]:
    """The likeliest response has no advantage over itself."""
    if algo.advantage.name == "remax" and rollout.top_k == 1:
        rule = "more than 1 with advantage remax, which compares the samples with the likeliest response"
        yield Problem("rollout.top_k", "1", rule, "set it to null")


def decays_are_read(algo: Algo) -> Iterator[Problem]:
    """A decay by length is for policies without a fixed one."""
    if algo.advantage.name == "vapo" and algo.advantage.options["lam_policy"] is not None:
        where = "with algo.advantage.lam_policy"
        yield from ineffective_settings(
            "algo.advantage", algo.advantage, ("length_alpha",), where, "or set lam_policy to null"
        )


def normalisers_are_whole(algo: Algo, data: PromptData) -> Iterator[Problem]:
    """A normaliser does something, on groups of more than one sample."""
    field, chosen = "algo.normalise.advantages", algo.normalise.advantages
    options = chosen.options
    if chosen.name == "whiten" and options["mean_only"]:
        names = ("ddof", "form", "eps")
        yield from ineffective_settings(
            field, chosen, names, "with mean_only, which does not divide", "or set mean_only to false"
        )
    if chosen.name == "levels":
        if options["mean"] is None and options["std"] is None:
            rule, fix = "shifts or scales: mean or std is not null", "choose none, which leaves the advantages"
            yield Problem(field, "levels", rule, fix)
        elif options["mean"] is None:
            yield from ineffective_settings(
                field, chosen, ("leave_one_out",), "without a mean", "or set mean to batch or group"
            )
        elif options["std"] is None:
            yield from ineffective_settings(
                field, chosen, ("unbiased", "eps"), "without std", "or set std to batch or group"
            )
    by_group = chosen.name == "levels" and "group" in (options["mean"], options["std"])
    if (chosen.name == "grouped_tokens" or by_group) and data.samples_per_prompt < 2:
        rule = f"at least 2 with {field} = {chosen.name} over the samples of a prompt"
        value, fix = str(data.samples_per_prompt), "set it to 2 or more, or normalise over the batch"
        yield Problem("data.samples_per_prompt", value, rule, fix)


def token_rewards_are_read(algo: Algo) -> Iterator[Problem]:
    """A comparison of samples sees no rewards of tokens."""
    if not algo.of_tokens:
        where = f"with advantage {algo.advantage.name}, which compares scores"
        yield from ineffective_settings("algo.normalise", algo.normalise, ("rewards",), where, "or choose gae")
        yield from ineffective_settings("algo.scores", algo.scores, ("placement",), where, "or choose gae")


def responses_weigh_alike(algo: Algo) -> Iterator[Problem]:
    """A loss of whole responses, which stands on each of their tokens, is averaged over the responses."""
    if algo.policy_loss.name in ("gspo", "gmpo") and algo.aggregation.name != "sequence_mean":
        if isinstance(algo.aggregation, CustomFunction):
            return
        rule = (
            f"sequence_mean with policy loss {algo.policy_loss.name}, which is of whole responses: "
            "others weigh them by their length"
        )
        fix = "set it to sequence_mean"
        yield Problem("algo.aggregation", algo.aggregation.name, rule, fix)


def ratios_have_room(algo: Algo) -> Iterator[Problem]:
    """Bounds of the probability ratio are in order, and beyond the clip: within it they would be the clip."""
    field, options = "algo.policy_loss", algo.policy_loss.options
    if algo.policy_loss.name != "ppo":
        return
    delta, ratio_clamp = options["delta"], options["ratio_clamp"]
    lowest = 1 - options["clip"]
    highest = 1 + (options["clip"] if options["clip_high"] is None else options["clip_high"])
    if delta is not None and delta <= highest:
        rule, fix = f"above 1 + clip_high = {highest:g}, where the other branch ends", "raise it, or set it to null"
        yield Problem(f"{field}.delta", f"{delta:g}", rule, fix)
    if ratio_clamp is not None and not (ratio_clamp[0] <= lowest and highest <= ratio_clamp[1]):
        rule = f"contains the interval of the clip, [{lowest:g}, {highest:g}]"
        value, fix = shown(list(ratio_clamp)), "widen it, or set it to null"
        yield Problem(f"{field}.ratio_clamp", value, rule, fix)


def filters_compare(algo: Algo, data: PromptData) -> Iterator[Problem]:
    """A filter can keep something, and rounds are those of a filter."""
    if algo.filter is None:
        yield from ineffective_settings("algo", algo, ("filter_rounds",), "without algo.filter", "or choose a filter")
        return
    if algo.filter.name == "nonzero_std" and data.samples_per_prompt < 2:
        rule = "at least 2 with algo.filter = nonzero_std: a sample alone has no deviation, and no prompt would be kept"
        value = str(data.samples_per_prompt)
        yield Problem("data.samples_per_prompt", value, rule, "set it to 2 or more")
    if algo.filter.name != "open_range":
        return
    low, high = algo.filter.options["low"], algo.filter.options["high"]
    if low >= high:
        rule, value = f"below algo.filter.high = {high:g}", f"{low:g}"
        yield Problem("algo.filter.low", value, rule, "lower it, or raise algo.filter.high")


def penalty_has_a_reference(algo: Algo, groups: Groups) -> Iterator[Problem]:
    """A penalty needs a reference, and a reference without a penalty would run for nothing."""
    reference = placed(groups, "reference")
    if algo.kl.coef > 0 and not reference:
        fix = "add reference to the roles of a group, or set algo.kl.coef to 0"
        yield Problem("algo.kl.coef", str(algo.kl.coef), "needs the role reference", fix)
    if algo.kl.coef == 0 and reference:
        fix = "remove the role reference from its group, or set algo.kl.coef above 0"
        rule = "above 0 where the role reference is placed; it has no effect otherwise"
        yield Problem("algo.kl.coef", "0", rule, fix)


def penalty_is_one(algo: Algo) -> Iterator[Problem]:
    """What a penalty is like means nothing without one, and the controller's settings nothing without its target."""
    kl = algo.kl
    if kl.coef == 0:
        names = ("placement", "estimator", "target", "horizon", "unit", "cumulative", "importance", "reference_sync")
        yield from ineffective_settings("algo.kl", kl, names, "with algo.kl.coef = 0", "or set the coefficient above 0")
        return
    if kl.target is None:
        yield from ineffective_settings("algo.kl", kl, ("horizon", "unit"), "without algo.kl.target", "or set a target")
    if kl.placement == "loss":
        yield from ineffective_settings(
            "algo.kl", kl, ("cumulative",), "with algo.kl.in = loss", "or set algo.kl.in to reward"
        )
    elif algo.of_tokens:
        where = f"with advantage {algo.advantage.name}, which adds up rewards by itself"
        yield from ineffective_settings(
            "algo.kl", kl, ("cumulative",), where, "or choose a comparison of samples, such as rloo"
        )
    if kl.placement == "reward":
        yield from ineffective_settings(
            "algo.kl", kl, ("importance",), "with algo.kl.in = reward", "or set algo.kl.in to loss"
        )
    elif kl.of_distributions:
        where = "with algo.kl.estimator = full, which is no estimate from samples"
        yield from ineffective_settings("algo.kl", kl, ("importance",), where, "or set algo.kl.estimator to k3")


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
        yield Problem(field, name, rule, fix)
    if kl.placement == "reward" and name == "full":
        rule = "of the sampled token with algo.kl.in = reward; full needs the whole distribution"
        yield Problem(field, name, rule, "set it to k1, or set algo.kl.in to loss")
    if kl.placement == "reward" and name.endswith("+"):
        rule = f"without + with algo.kl.in = reward: {name} differs from {name[:-1]} in its gradient alone"
        yield Problem(field, name, rule, f"set it to {name[:-1]}, or set algo.kl.in to loss")


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
            yield Problem(field, f"in {name}", rule, f"place it in the actor's group, or {fix}")
            continue
        sizes = ("tp", "pp", "vpp", "ep", "sequence_parallel")
        actor, reference = ({size: getattr(group.roles[of], size) for size in sizes} for of in ("actor", "reference"))
        if actor != reference:
            layout, value = (", ".join(f"{size} {of[size]}" for size in sizes) for of in (actor, reference))
            rule = f"the actor's layout ({layout}) {where}"
            yield Problem(field, value, rule, f"give both the same layout, or {fix}")


def references_follow_in_time(algo: Algo, run: TrainingRun) -> Iterator[Problem]:
    """The reference moves before the last step, after which nothing looks at it."""
    sync = algo.kl.reference_sync
    if algo.kl.coef > 0 and sync is not None and sync.every >= run.steps:
        rule = f"below run.steps = {run.steps}: the reference would not move before the last step"
        fix = "lower it, raise run.steps, or set algo.kl.reference_sync to null"
        yield Problem("algo.kl.reference_sync.every", str(sync.every), rule, fix)


def ratios_differ_from_one(algo: Algo) -> Iterator[Problem]:
    """Where the old log-probabilities are the engines', their ratio to these is 1."""
    correction = algo.correction
    if correction.old_logprobs == "rollout":
        where = "with algo.correction.old_logprobs = rollout: the ratio to the engines is 1"
        names = ("weights", "reject", "m2po")
        yield from ineffective_settings(
            "algo.correction", correction, names, where, "or recompute the old log-probabilities"
        )
    elif correction.old_logprobs != "recompute":
        where = f"with algo.correction.old_logprobs = {correction.old_logprobs}, which are known in the update alone"
        yield from ineffective_settings("algo.correction", correction, ("reject", "m2po"), where, "or recompute them")


def bounds_are_in_order(algo: Algo) -> Iterator[Problem]:
    """Lower bounds are below upper ones, and where there may be any."""
    weights = _named_weights(algo)
    if weights and weights["lower"] is not None and weights["lower"] >= weights["upper"]:
        rule = f"below algo.correction.weights.upper = {weights['upper']:g}"
        yield Problem("algo.correction.weights.lower", f"{weights['lower']:g}", rule, "lower it")
    for index, reject in enumerate(algo.correction.reject):
        field = f"algo.correction.reject.{index}.lower"
        if reject.lower is None:
            if reject.statistic.endswith("k1") and reject.upper <= 1:
                rule, value = "above 1, or with a lower bound: the usual one is 1 / upper", f"{reject.upper:g}"
                fix = "raise it, or give lower"
                yield Problem(f"algo.correction.reject.{index}.upper", value, rule, fix)
            continue
        if not reject.statistic.endswith("k1"):
            rule, fix = f"for k1 alone; {reject.statistic} is never negative", "remove it"
            yield Problem(field, f"{reject.lower:g}", rule, fix)
        elif reject.lower >= reject.upper:
            rule = f"below algo.correction.reject.{index}.upper = {reject.upper:g}"
            yield Problem(field, f"{reject.lower:g}", rule, "lower it")


def interpolation_has_an_age(algo: Algo, rollout: Rollout) -> Iterator[Problem]:
    """Log-probabilities between the engines' and the actor's are for rollouts of older weights."""
    chosen = algo.correction.old_logprobs
    if chosen in ("loglinear", "linear") and rollout.sync_every == 1:
        rule = "recompute or rollout with rollout.sync_every = 1, where no rollout is older than the actor"
        fix = "set it to recompute, or raise rollout.sync_every"
        yield Problem("algo.correction.old_logprobs", chosen, rule, fix)


def normalised_weights_are_known(algo: Algo) -> Iterator[Problem]:
    """Weights to log-probabilities that are known in the update alone have no mean over the step."""
    weights, chosen = _named_weights(algo), algo.correction.old_logprobs
    if weights and weights["batch_normalise"] and chosen in ("loglinear", "linear"):
        rule = f"false with algo.correction.old_logprobs = {chosen}, which changes in each micro-batch"
        fix = "set it to false, or recompute the old log-probabilities"
        yield Problem("algo.correction.weights.batch_normalise", "True", rule, fix)


def _named_weights(algo: Algo) -> Mapping[str, Any]:
    """The options of the rollout weights; none without weights, and of a custom function."""
    weights = algo.correction.weights
    return {} if weights is None or isinstance(weights, CustomFunction) else weights.options


RULES = (
    advantages_have_their_critic,
    value_losses_have_a_critic,
    groups_of_samples_are_compared,
    samples_differ_from_the_likeliest,
    decays_are_read,
    normalisers_are_whole,
    token_rewards_are_read,
    responses_weigh_alike,
    ratios_have_room,
    filters_compare,
    penalty_has_a_reference,
    penalty_is_one,
    estimators_fit_their_place,
    references_share_the_actors_ranks,
    references_follow_in_time,
    ratios_differ_from_one,
    bounds_are_in_order,
    interpolation_has_an_age,
    normalised_weights_are_known,
)
