"""What PPO's parts need of each other, and which settings have no effect without another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megarl.config.problems import Problem, shown
from megarl.config.rules.placement import placed
from megarl.config.schema import Algo, Critic, Evaluation, Group, PromptData, Reward, Section

Groups = Mapping[str, Group]


def advantages_have_their_critic(algo: Algo, groups: Groups, critic: Critic | None) -> Iterator[Problem]:
    """GAE needs values, the comparison of a prompt's samples has none."""
    if algo.advantage == "gae":
        if not placed(groups, "critic"):
            fix = "add critic to the roles of a group, or choose grpo"
            yield Problem(field="algo.advantage", value="gae", rule="needs the role critic", fix=fix)
        if critic is None:
            fix = "add the section critic with an optimizer, or choose grpo"
            yield Problem(field="critic", value="null", rule="advantage gae needs the section critic", fix=fix)
        return
    for name, group in groups.items():
        if "critic" in group.roles:
            field = f"groups.{name}.roles.critic"
            rule = f"advantage {algo.advantage} has no critic"
            yield Problem(field=field, value="critic", rule=rule, fix=f"remove it: {field}=null, or choose gae")
    if critic is not None:
        rule = f"has no effect with advantage {algo.advantage}"
        yield Problem(field="critic", value="given", rule=rule, fix="remove it: critic=null, or choose gae")


def groups_of_samples_are_compared(algo: Algo, data: PromptData) -> Iterator[Problem]:
    """A sample alone has no advantage over the others of its prompt."""
    if algo.advantage == "grpo" and data.samples_per_prompt < 2:
        rule = "at least 2 with advantage grpo, which compares the samples of a prompt"
        field = "data.samples_per_prompt"
        yield Problem(field=field, value=str(data.samples_per_prompt), rule=rule, fix="set it to 2 or more")


def grpo_is_of_outcomes(algo: Algo) -> Iterator[Problem]:
    """GRPO compares scores: rewards of single tokens, and what is done to them, are not part of it."""
    if algo.advantage != "grpo":
        return
    if algo.kl.coef > 0 and algo.kl.placement == "reward":
        rule = "loss with advantage grpo, which sees no rewards of tokens"
        yield Problem(field="algo.kl.in", value="reward", rule=rule, fix="set it to loss, or algo.kl.coef to 0")
    names = ("gamma", "lam", "whiten_advantages", "value_clip")
    yield from _unused("algo", algo, names, "with advantage grpo", "or choose gae")


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
    """What a penalty is like means nothing without one, and the controller's horizon nothing without its target."""
    if algo.kl.coef == 0:
        names = ("placement", "estimator", "target", "horizon")
        yield from _unused("algo.kl", algo.kl, names, "with algo.kl.coef = 0", "or set the coefficient above 0")
    elif algo.kl.target is None:
        yield from _unused("algo.kl", algo.kl, ("horizon",), "without algo.kl.target", "or set a target")


def penalty_in_the_loss_pulls(algo: Algo) -> Iterator[Problem]:
    """The gradient of k1 has mean 0 over the policy's own tokens: as a loss it adds noise and no penalty."""
    kl = algo.kl
    if kl.coef > 0 and kl.placement == "loss" and kl.estimator == "k1":
        rule = "k2 or k3 with algo.kl.in = loss, where the gradient of k1 is 0 on average"
        fix = "set it to k3, or set algo.kl.in to reward"
        yield Problem(field="algo.kl.estimator", value=kl.estimator, rule=rule, fix=fix)


def scores_have_a_source(groups: Groups, reward: Reward) -> Iterator[Problem]:
    """Something scores the responses."""
    if not placed(groups, "reward") and not reward.functions:
        fix = "add reward to the roles of a group, or give reward.functions"
        rule = "a group has the role reward, or reward.functions has a rule"
        yield Problem(field="reward", value="nothing scores", rule=rule, fix=fix)


def reward_settings_have_their_model(groups: Groups, reward: Reward) -> Iterator[Problem]:
    """A head's initialisation is given for a random head alone, and the rest of a reward model for the role."""
    if not placed(groups, "reward"):
        names = ("path", "head_std", "head_seed", "weight")
        yield from _unused("reward", reward, names, "without the role reward", "or add the role to a group")
    elif reward.path is not None:
        names = ("head_std", "head_seed")
        yield from _unused("reward", reward, names, "with reward.path, whose head is loaded", "or remove the path")


def processes_have_functions(reward: Reward, evaluation: Evaluation | None) -> Iterator[Problem]:
    """The processes run rules."""
    if not reward.functions and (evaluation is None or not evaluation.functions):
        yield from _unused("reward", reward, ("processes",), "without functions", "or give reward.functions")


def head_seed_draws_a_head(critic: Critic | None) -> Iterator[Problem]:
    """A head of zeros is not drawn."""
    if critic is not None and critic.head_std == 0:
        names = ("head_seed",)
        yield from _unused("critic", critic, names, "with critic.head_std = 0", "or raise critic.head_std")


def evaluations_report_something(groups: Groups, evaluation: Evaluation | None) -> Iterator[Problem]:
    """Held-out answers are scored."""
    if evaluation is not None and not evaluation.functions and not placed(groups, "reward"):
        fix = "give evaluation.functions, or remove evaluation"
        rule = "has rules to report, or a group has the role reward"
        yield Problem(field="evaluation.functions", value="[]", rule=rule, fix=fix)


def evaluations_weigh_nothing(evaluation: Evaluation | None) -> Iterator[Problem]:
    """Every rule of an evaluation is reported by itself."""
    for index, function in enumerate(() if evaluation is None else evaluation.functions):
        where = "in an evaluation, which reports each function by itself"
        yield from _unused(f"evaluation.functions.{index}", function, ("weight",), where, "or name it in reward")


def _unused(field: str, section: Section, names: tuple[str, ...], where: str, otherwise: str) -> Iterator[Problem]:
    """The fields that were changed, and mean nothing as things are."""
    for name in names:
        info = type(section).model_fields[name]
        value = getattr(section, name)
        if value != info.default:
            key = f"{field}.{info.alias or name}"
            yield Problem(field=key, value=shown(value), rule=f"has no effect {where}", fix=f"remove it, {otherwise}")


RULES = (
    advantages_have_their_critic,
    groups_of_samples_are_compared,
    grpo_is_of_outcomes,
    penalty_has_a_reference,
    penalty_is_one,
    penalty_in_the_loss_pulls,
    scores_have_a_source,
    reward_settings_have_their_model,
    processes_have_functions,
    head_seed_draws_a_head,
    evaluations_report_something,
    evaluations_weigh_nothing,
)
