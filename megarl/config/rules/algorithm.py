"""What the parts of an algorithm need of each other: advantages, their normalisation, losses, and loops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megarl.config.problems import Problem, shown
from megarl.config.rules.placement import placed
from megarl.config.rules.unused import unused
from megarl.config.schema import Algo, Critic, Group, PromptData, Rollout, TrainingRun
from megarl.config.schema.advantages import GAE, VAPO, OwnAdvantage
from megarl.config.schema.algo import NonzeroStd, OpenRange
from megarl.config.schema.choices import Own
from megarl.config.schema.losses import GMPO, GSPO, PPO
from megarl.config.schema.normalisation import GroupedTokens, Levels, Whiten

Groups = Mapping[str, Group]


def advantages_have_their_critic(algo: Algo, groups: Groups, critic: Critic | None) -> Iterator[Problem]:
    """GAE needs values; what has no use for them has no critic."""
    name, given = algo.advantage.name, placed(groups, "critic")
    if isinstance(algo.advantage, GAE | VAPO):
        if not given:
            fix = "add critic to the roles of a group, or choose an advantage without one, such as grpo"
            yield Problem(field="algo.advantage", value=name, rule="needs the role critic", fix=fix)
        if critic is None:
            fix = "add the section critic with an optimizer, or choose an advantage without one, such as grpo"
            yield Problem(field="critic", value="null", rule=f"advantage {name} needs the section critic", fix=fix)
        return
    if isinstance(algo.advantage, OwnAdvantage) and algo.advantage.level == "token" and given == (critic is not None):
        return  # it may read values, or not
    for group_name, group in groups.items():
        if "critic" in group.roles:
            field = f"groups.{group_name}.roles.critic"
            fix = f"remove it: {field}=null, or choose gae"
            yield Problem(field=field, value="critic", rule=f"advantage {name} has no critic", fix=fix)
    if critic is not None:
        rule, fix = f"has no effect with advantage {name}", "remove it: critic=null, or choose gae"
        yield Problem(field="critic", value="given", rule=rule, fix=fix)


def value_losses_have_a_critic(algo: Algo, critic: Critic | None) -> Iterator[Problem]:
    """Without a critic there is no loss of it."""
    if critic is None:
        yield from unused("algo", algo, ("value_loss",), "without a critic", "or choose gae")


def groups_of_samples_are_compared(algo: Algo, data: PromptData) -> Iterator[Problem]:
    """A sample alone has no advantage over the others of its prompt."""
    name = algo.advantage.name
    if algo.of_tokens or isinstance(algo.advantage, Own) or name == "remax":
        return
    needed = 3 if name == "rloo_std" else 2
    if data.samples_per_prompt < needed:
        what = "which compares the samples of a prompt" if needed == 2 else "which takes the deviation of the others"
        rule = f"at least {needed} with advantage {name}, {what}"
        fix = f"set it to {needed} or more"
        yield Problem(field="data.samples_per_prompt", value=str(data.samples_per_prompt), rule=rule, fix=fix)


def samples_differ_from_the_likeliest(algo: Algo, rollout: Rollout) -> Iterator[Problem]:
    """The likeliest response has no advantage over itself."""
    if algo.advantage.name == "remax" and rollout.top_k == 1:
        rule = "more than 1 with advantage remax, which compares the samples with the likeliest response"
        yield Problem(field="rollout.top_k", value="1", rule=rule, fix="set it to null")


def decays_are_read(algo: Algo) -> Iterator[Problem]:
    """A decay by length is for policies without a fixed one."""
    if isinstance(algo.advantage, VAPO) and algo.advantage.lam_policy is not None:
        where = "with algo.advantage.lam_policy"
        yield from unused("algo.advantage", algo.advantage, ("length_alpha",), where, "or set lam_policy to null")


def normalisers_are_whole(algo: Algo, data: PromptData) -> Iterator[Problem]:
    """A normaliser does something, on groups of more than one sample."""
    field, chosen = "algo.normalise.advantages", algo.normalise.advantages
    if isinstance(chosen, Whiten) and chosen.mean_only:
        names = ("ddof", "form", "eps")
        yield from unused(field, chosen, names, "with mean_only, which does not divide", "or set mean_only to false")
    if isinstance(chosen, Levels):
        if chosen.mean is None and chosen.std is None:
            rule, fix = "shifts or scales: mean or std is not null", "choose none, which leaves the advantages"
            yield Problem(field=field, value="levels", rule=rule, fix=fix)
        elif chosen.mean is None:
            yield from unused(field, chosen, ("leave_one_out",), "without a mean", "or set mean to batch or group")
        elif chosen.std is None:
            yield from unused(field, chosen, ("unbiased", "eps"), "without std", "or set std to batch or group")
    grouped = isinstance(chosen, GroupedTokens) or (isinstance(chosen, Levels) and "group" in (chosen.mean, chosen.std))
    if grouped and data.samples_per_prompt < 2:
        rule = f"at least 2 with {field} = {chosen.name} over the samples of a prompt"
        value, fix = str(data.samples_per_prompt), "set it to 2 or more, or normalise over the batch"
        yield Problem(field="data.samples_per_prompt", value=value, rule=rule, fix=fix)


def token_rewards_are_read(algo: Algo) -> Iterator[Problem]:
    """A comparison of samples sees no rewards of tokens."""
    if not algo.of_tokens:
        where = f"with advantage {algo.advantage.name}, which compares scores"
        yield from unused("algo.normalise", algo.normalise, ("rewards",), where, "or choose gae")
        yield from unused("algo.scores", algo.scores, ("placement",), where, "or choose gae")


def responses_weigh_alike(algo: Algo) -> Iterator[Problem]:
    """A loss of whole responses, which stands on each of their tokens, is averaged over the responses."""
    if isinstance(algo.policy_loss, GSPO | GMPO) and algo.aggregation.name != "sequence_mean":
        if isinstance(algo.aggregation, Own):
            return
        rule = (
            f"sequence_mean with policy loss {algo.policy_loss.name}, which is of whole responses: "
            "others weigh them by their length"
        )
        fix = "set it to sequence_mean"
        yield Problem(field="algo.aggregation", value=algo.aggregation.name, rule=rule, fix=fix)


def ratios_have_room(algo: Algo) -> Iterator[Problem]:
    """Bounds of the probability ratio are in order, and beyond the clip: within it they would be the clip."""
    loss, field = algo.policy_loss, "algo.policy_loss"
    if not isinstance(loss, PPO):
        return
    highest = 1 + (loss.clip if loss.clip_high is None else loss.clip_high)
    if loss.delta is not None and loss.delta <= highest:
        rule, fix = f"above 1 + clip_high = {highest:g}, where the other branch ends", "raise it, or set it to null"
        yield Problem(field=f"{field}.delta", value=f"{loss.delta:g}", rule=rule, fix=fix)
    if loss.ratio_clamp is not None and not (loss.ratio_clamp[0] <= 1 - loss.clip and highest <= loss.ratio_clamp[1]):
        rule = f"contains the interval of the clip, [{1 - loss.clip:g}, {highest:g}]"
        value, fix = shown(list(loss.ratio_clamp)), "widen it, or set it to null"
        yield Problem(field=f"{field}.ratio_clamp", value=value, rule=rule, fix=fix)


def filters_compare(algo: Algo, data: PromptData) -> Iterator[Problem]:
    """A filter can keep something, and rounds are those of a filter."""
    if algo.filter is None:
        yield from unused("algo", algo, ("filter_rounds",), "without algo.filter", "or choose a filter")
    if isinstance(algo.filter, NonzeroStd) and data.samples_per_prompt < 2:
        rule = "at least 2 with algo.filter = nonzero_std: a sample alone has no deviation, and no prompt would be kept"
        value = str(data.samples_per_prompt)
        yield Problem(field="data.samples_per_prompt", value=value, rule=rule, fix="set it to 2 or more")
    if isinstance(algo.filter, OpenRange) and algo.filter.low >= algo.filter.high:
        rule, value = f"below algo.filter.high = {algo.filter.high:g}", f"{algo.filter.low:g}"
        yield Problem(field="algo.filter.low", value=value, rule=rule, fix="lower it, or raise algo.filter.high")


def epochs_can_stop(algo: Algo) -> Iterator[Problem]:
    """There is an epoch to leave out."""
    if algo.early_stop is not None and algo.ppo_epochs == 1:
        rule, fix = "has an effect with algo.ppo_epochs above 1 alone", "set it to null, or raise algo.ppo_epochs"
        yield Problem(field="algo.early_stop", value="given", rule=rule, fix=fix)


def warm_ups_end(critic: Critic | None, run: TrainingRun) -> Iterator[Problem]:
    """The actor is trained at last."""
    if critic is not None and critic.warmup_steps >= run.steps:
        rule = f"below run.steps = {run.steps}: the actor would not be trained"
        value, fix = str(critic.warmup_steps), "lower it, or raise run.steps"
        yield Problem(field="critic.warmup_steps", value=value, rule=rule, fix=fix)


def value_heads_have_a_source(critic: Critic | None) -> Iterator[Problem]:
    """A head is loaded from a checkpoint, or drawn; a head of zeros is not drawn."""
    if critic is None:
        return
    if critic.head == "loaded":
        if critic.path is None:
            fix = "set critic.path to a reward model, or critic.head to new"
            yield Problem(field="critic.head", value="loaded", rule="needs critic.path", fix=fix)
        names = ("head_std", "head_seed")
        yield from unused("critic", critic, names, "with critic.head = loaded", "or set critic.head to new")
    elif critic.head_std == 0:
        where = "with critic.head_std = 0"
        yield from unused("critic", critic, ("head_seed",), where, "or raise critic.head_std")


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
    epochs_can_stop,
    warm_ups_end,
    value_heads_have_a_source,
)
