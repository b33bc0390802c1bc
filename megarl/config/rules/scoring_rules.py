"""Rules of reward models and functions, of scores, and of evaluations."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.problems import Broken, Problem, ineffective_settings
from megarl.config.rules.model_rules import ids_in_use
from megarl.config.rules.placement_rules import placed
from megarl.config.schema import (
    Algo,
    Cluster,
    EnvironmentSettings,
    Evaluation,
    Groups,
    HeldOut,
    Model,
    PromptData,
    Reference,
    Reward,
    RewardFunction,
)

_WITHOUT_REWARD = ("tools", "user_turns")
"""Built-in environments whose reward is always 0: something else scores their conversations."""


def score_weights(groups: Groups, reward: Reward, environment: EnvironmentSettings | None) -> list[float]:
    """Returns the weight of each reward; none where nothing scores the responses."""
    weights = [function.weight for function in reward.functions]
    if placed(groups, "reward"):
        weights.append(reward.weight)
    if environment is not None and environment.name not in _WITHOUT_REWARD:
        weights.append(environment.weight)
    if reward.judge_model is not None:
        weights.append(reward.judge_model.weight)
    return weights


def scores_have_a_source(
    algo: Algo,
    reference: Reference,
    groups: Groups,
    reward: Reward,
    data: PromptData,
    environment: EnvironmentSettings | None,
) -> Iterator[Broken]:
    """A reward model, a function or the environment scores, with a weight that is not 0; a teacher needs none."""
    weights = score_weights(groups, reward, environment)
    if not weights and reference.directories and algo.kl.coef > 0:
        yield from _nothing_reads_scores(algo, reward, data, environment)
    elif not weights:
        others = "reward.judge_model or an environment other than " + " and ".join(_WITHOUT_REWARD)
        rule = f"a group must have the role reward, reward.functions a function, or there must be {others}"
        fix = "add reward to the roles of a group, or give reward.functions"
        if algo.advantage.name == "none":
            fix += "; for on-policy distillation, give reference.path, the teacher"
        yield Problem("reward", "nothing scores", rule, fix)
    elif not any(weights):
        rule = "one that is not 0: nothing could be learned from scores"
        fix = "raise reward.weight, or that of a function; evaluation.functions reports scores that are not learned"
        yield Problem("reward", "all weights 0", rule, fix)
    elif algo.advantage.name == "none" and "advantages" in algo.loss_reads and algo.kl.coef > 0:
        rule = "an advantage where responses are scored: without it, the penalty alone is learned"
        yield "algo.advantage", rule, "choose one, such as grpo, or remove what scores"


def _nothing_reads_scores(
    algo: Algo, reward: Reward, data: PromptData, environment: EnvironmentSettings | None
) -> Iterator[Broken]:
    """Without scores the reference teaches alone: advantages are of its penalty, and nothing reads scores."""
    where = "where nothing scores, and a teacher alone teaches"
    otherwise = "or give reward.functions"
    of_penalties = algo.from_token_rewards and algo.kl.placement == "reward"
    if algo.advantage.name != "none" and not of_penalties:
        yield "algo.advantage", f"none {where}", f"set it to none, {otherwise}"
    yield from ineffective_settings("algo", algo, ("filter", "select"), where, otherwise)
    yield from ineffective_settings("data", data, ("curriculum",), where, otherwise)
    shaping = ["clip", "placement"]
    missing = algo.scores.missing_end
    if missing is None or missing.name != "mask":  # which needs no scores
        shaping += ["missing_end", "truncate_at"]
    yield from ineffective_settings("algo.scores", algo.scores, shaping, where, otherwise)
    names = ["shuffle"]
    if environment is None:  # whose conversations may fail
        names.append("max_unscored_steps")
    yield from ineffective_settings("reward", reward, names, where, otherwise)


def processes_have_functions(reward: Reward, evaluation: Evaluation | None) -> Iterator[Broken]:
    """The settings of reward processes need a function."""
    if not reward.functions and (evaluation is None or not evaluation.functions):
        names = ["time_limit", "retries"]
        if reward.judge_model is None:
            names.append("processes")
        yield from ineffective_settings("reward", reward, names, "without functions", "or give reward.functions")


def calls_end_in_time(cluster: Cluster, reward: Reward, evaluation: Evaluation | None) -> Iterator[Broken]:
    """One call of a function may take at most as long as all calls of a step."""
    most = cluster.time_limits.calls
    functions = reward.functions
    if evaluation is not None:
        functions += evaluation.functions
    if functions and reward.time_limit > most:
        rule = f"at most {most:g}, nine tenths of cluster.time_limits.scoring, which all calls of a step have together"
        yield "reward.time_limit", rule, "lower it, or raise cluster.time_limits.scoring"


def unfinished_responses_are_compared(algo: Algo) -> Iterator[Broken]:
    """gdpo compares scores of unfinished responses as they are, but may mask them; masked_rloo must."""
    missing = algo.scores.missing_end
    masks = missing is not None and missing.name == "mask"
    if algo.advantage.name == "gdpo" and not masks:
        where = "with advantage gdpo, which compares the score of each source as it is"
        yield from ineffective_settings("algo.scores", algo.scores, ("missing_end",), where, "or choose grpo")
    if algo.advantage.name == "masked_rloo" and not masks:
        rule = "mask with advantage masked_rloo, which compares the responses that ended alone"
        yield "algo.scores.missing_end", rule, "set it to mask, or choose rloo"


def scores_end_at_tokens(model: Model, algo: Algo) -> Iterator[Broken]:
    """The token at which scores end may be sampled."""
    cut = algo.scores.truncate_at
    used = ids_in_use(model)
    if cut is not None and used is not None and cut.token >= used:
        rule = f"below {used}, the number of ids in use: others are never sampled"
        yield "algo.scores.truncate_at.token", rule, "correct it"


def evaluations_report_something(
    groups: Groups, reward: Reward, evaluation: Evaluation, environment: EnvironmentSettings | None
) -> Iterator[Broken]:
    """An evaluation has functions, a reward model, a judge or an environment."""
    if reward.judge_model is not None:
        return
    if environment is not None and environment.name not in _WITHOUT_REWARD:
        return
    if not evaluation.functions and not placed(groups, "reward"):
        otherwise = "place the role reward" if isinstance(evaluation, HeldOut) else "remove evaluation"
        rule = "needs something to measure: evaluation.functions or a reward model"
        yield "evaluation.functions", rule, f"give evaluation.functions, or {otherwise}"


def functions_have_their_calls(field: str, function: RewardFunction) -> Iterator[Broken]:
    """Built-in functions score one response, and judges several at once; cache and adapter fit the call."""
    if field.startswith("evaluation"):
        where = "in an evaluation, which reports each function by itself"
        yield from ineffective_settings(field, function, ("weight",), where, "or name it in reward")
    if ":" not in function.name:
        names = ["adapter", "per"]
        if function.name != "judge":
            names.append("concurrency")
        otherwise = "or name a function of your own"
        yield from ineffective_settings(field, function, names, "with a built-in function", otherwise)
        return
    if function.cache and function.unit == "group":
        rule = "false with per: group, where a score depends on the other responses"
        yield f"{field}.cache", rule, "set it to false, or per to batch"
    units = {"trl": ("batch", "group"), "verl": ("response", "batch")}
    if function.adapter is not None and function.unit not in units[function.adapter]:
        rule = f"{' or '.join(units[function.adapter])} with adapter {function.adapter}"
        yield Problem(f"{field}.per", function.unit, rule, "choose one of them, or set adapter to null")


def evaluations_have_samples(evaluation: Evaluation) -> Iterator[Broken]:
    """pass@k needs k answers."""
    needed = max(evaluation.pass_at, default=0)
    if needed > evaluation.samples_per_prompt:
        rule = f"at most evaluation.samples_per_prompt = {evaluation.samples_per_prompt}"
        yield "evaluation.pass_at", rule, f"set samples_per_prompt to {needed} or more"
