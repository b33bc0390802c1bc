"""Rules of reward models and functions, of scores, and of evaluations."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.problems import Problem, ineffective_settings, shown
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
    Reward,
    Rollout,
    trains,
)

_WITHOUT_REWARD = ("tools", "user_turns")
"""Built-in environments whose reward is always 0: something else scores their conversations."""


def evaluations_have_no_weights(
    stage: str, reward: Reward, environment: EnvironmentSettings | None
) -> Iterator[Problem]:
    """An evaluation reports each source of scores by itself."""
    if not trains(stage):
        names = ("weight", "functions", "dense", "shuffle")
        where = f"in stage {stage}, which reports each source by itself"
        otherwise = "or name functions in evaluation.functions"
        yield from ineffective_settings("reward", reward, names, where, otherwise)
        sections = {"environment": environment, "reward.judge_model": reward.judge_model}
        for field, section in sections.items():
            if section is not None:
                yield from ineffective_settings(field, section, ("weight",), where, "or use ppo")


def scores_have_a_source(
    stage: str, groups: Groups, reward: Reward, environment: EnvironmentSettings | None
) -> Iterator[Problem]:
    """In training, a reward model, a function or the environment scores, with a weight that is not 0."""
    if not trains(stage):
        return
    weights = [function.weight for function in reward.functions]
    if placed(groups, "reward"):
        weights.append(reward.weight)
    if environment is not None and environment.name not in _WITHOUT_REWARD:
        weights.append(environment.weight)
    if reward.judge_model is not None:
        weights.append(reward.judge_model.weight)
    if not weights:
        others = "reward.judge_model or an environment other than " + " and ".join(_WITHOUT_REWARD)
        rule = f"a group has the role reward, reward.functions has a function, or there is {others}"
        fix = "add reward to the roles of a group, or give reward.functions"
        yield Problem("reward", "nothing scores", rule, fix)
    elif not any(weights):
        rule = "one that is not 0: nothing could be learnt"
        fix = "raise reward.weight, or that of a function"
        yield Problem("reward", "all weights 0", rule, fix)


def reward_settings_have_their_model(groups: Groups, reward: Reward) -> Iterator[Problem]:
    """The settings of the reward model need the role; those of its random head, no checkpoint."""
    if not placed(groups, "reward"):
        names = ("path", "head_std", "head_seed", "weight", "dense")
        where = "without the role reward"
        yield from ineffective_settings("reward", reward, names, where, "or add the role to a group")
    elif reward.path is not None:
        names = ("head_std", "head_seed")
        where = "with reward.path, whose head is loaded"
        yield from ineffective_settings("reward", reward, names, where, "or remove the path")


def reward_heads_have_a_source(groups: Groups, model: Model, reward: Reward) -> Iterator[Problem]:
    """A language model's checkpoint has no score head; a random head is for trials with a random model."""
    if placed(groups, "reward") and model.path is not None and reward.path is None:
        rule = "a reward model with model.path: a random head on that model would score at random"
        fix = "give it, or remove the role reward from its group"
        yield Problem("reward.path", "null", rule, fix)


def processes_have_functions(reward: Reward, evaluation: Evaluation | None) -> Iterator[Problem]:
    """The settings of reward processes need a function."""
    if not reward.functions and (evaluation is None or not evaluation.functions):
        names = ("processes", "time_limit", "retries") if reward.judge_model is None else ("time_limit", "retries")
        yield from ineffective_settings("reward", reward, names, "without functions", "or give reward.functions")


def calls_end_in_time(cluster: Cluster, reward: Reward, evaluation: Evaluation | None) -> Iterator[Problem]:
    """One call of a function may take at most as long as all calls of a step."""
    most = cluster.time_limits.calls
    if (reward.functions or (evaluation is not None and evaluation.functions)) and reward.time_limit > most:
        rule = f"at most {most:g}, nine tenths of cluster.time_limits.scoring, which all calls of a step have together"
        fix = "lower it, or raise cluster.time_limits.scoring"
        yield Problem("reward.time_limit", f"{reward.time_limit:g}", rule, fix)


def environments_end_in_time(
    cluster: Cluster, model: Model, environment: EnvironmentSettings | None
) -> Iterator[Problem]:
    """An environment talks in text; one of its calls may take at most as long as the generation of a step."""
    if environment is None:
        return
    if model.tokenizer is None and model.path is None:
        yield Problem("environment", environment.name, "needs a tokenizer", "set model.tokenizer")
    most = cluster.time_limits.rollout
    if environment.time_limit > most:
        rule = f"at most cluster.time_limits.rollout = {most:g}"
        fix = "lower it, or raise cluster.time_limits.rollout"
        yield Problem("environment.time_limit", f"{environment.time_limit:g}", rule, fix)


def conversations_are_scored_whole(algo: Algo, environment: EnvironmentSettings | None) -> Iterator[Problem]:
    """Scores end at no token of a conversation."""
    if environment is not None and algo.scores.truncate_at is not None:
        rule = "null with an environment, whose reward is that of the whole conversation"
        yield Problem("algo.scores.truncate_at", "given", rule, "remove it")


def shaped_scores_are_compared(algo: Algo) -> Iterator[Problem]:
    """gdpo compares the scores of each source without shaping; it may mask responses without an end."""
    if algo.advantage.name == "gdpo":
        masks = algo.scores.missing_end is not None and algo.scores.missing_end.name == "mask"
        names = ("clip",) if masks else ("clip", "missing_end")
        where = "with advantage gdpo, which compares the score of each source as it is"
        yield from ineffective_settings("algo.scores", algo.scores, names, where, "or choose grpo")


def judges_have_room(model: Model, reward: Reward) -> Iterator[Problem]:
    """A judge reads text, and a question has room beside the longest answer."""
    judge = reward.judge_model
    if judge is None:
        return
    if model.tokenizer is None and model.path is None:
        yield Problem("reward.judge_model", judge.path, "reads text: needs a tokenizer", "set model.tokenizer")
    if judge.max_new_tokens >= judge.max_model_len:
        rule = f"below reward.judge_model.max_model_len = {judge.max_model_len}: the question needs room"
        yield Problem("reward.judge_model.max_new_tokens", str(judge.max_new_tokens), rule, "lower it")


def masked_comparisons_mask(algo: Algo) -> Iterator[Problem]:
    """masked_rloo does not compare responses without an end, and they must be masked."""
    missing = algo.scores.missing_end
    if algo.advantage.name == "masked_rloo" and (missing is None or missing.name != "mask"):
        value = "null" if missing is None else missing.name
        rule = "mask with advantage masked_rloo, which compares the responses that ended alone"
        yield Problem("algo.scores.missing_end", value, rule, "set it to mask, or choose rloo")


def rewards_of_turns_stay(algo: Algo, reward: Reward, environment: EnvironmentSettings | None) -> Iterator[Problem]:
    """Rewards of turns fit no other conversation."""
    if environment is not None and algo.of_tokens and reward.shuffle:
        rule = f"false with an environment and advantage {algo.advantage.name}, which places the rewards of turns"
        yield Problem("reward.shuffle", "True", rule, "set it to false, or choose grpo")


def dense_scores_are_read(algo: Algo, reward: Reward) -> Iterator[Problem]:
    """Dense scores need an advantage of token rewards, and nothing that reads one score of a response."""
    if reward.dense is None:
        return
    if not algo.of_tokens:
        where = f"with advantage {algo.advantage.name}, which compares scores"
        yield from ineffective_settings("reward", reward, ("dense",), where, "or choose gae")
    otherwise = "or set reward.dense to null"
    yield from ineffective_settings("algo.scores", algo.scores, ("placement",), "with reward.dense", otherwise)
    if algo.filter is not None:
        rule = "null with reward.dense: prompts are filtered by the scores of responses"
        fix = "set one of them to null"
        yield Problem("algo.filter", algo.filter.name, rule, fix)
    if algo.select is not None:
        rule = "null with reward.dense: samples are selected by the scores of responses"
        fix = "set one of them to null"
        yield Problem("algo.select", algo.select.by.name, rule, fix)
    if algo.scores.truncate_at is not None:
        rule = "null with reward.dense, which scores every token"
        fix = "remove it, or set reward.dense to null"
        yield Problem("algo.scores.truncate_at", "given", rule, fix)
    if reward.shuffle:
        rule = "false with reward.dense, whose scores fit no other response"
        fix = "set it to false"
        yield Problem("reward.shuffle", "True", rule, fix)


def scores_end_within_responses(model: Model, rollout: Rollout, algo: Algo) -> Iterator[Problem]:
    """The token at which scores end may be sampled."""
    field = "algo.scores"
    cut = algo.scores.truncate_at
    used = ids_in_use(model)
    if cut is not None and used is not None and cut.token >= used:
        rule = f"below {used}, the number of ids in use: others are never sampled"
        yield Problem(f"{field}.truncate_at.token", str(cut.token), rule, "correct it")
    if cut is not None and cut.after >= rollout.max_new_tokens:
        rule = f"below rollout.max_new_tokens = {rollout.max_new_tokens}"
        yield Problem(f"{field}.truncate_at.after", str(cut.after), rule, "lower it")


def evaluations_report_something(
    groups: Groups, reward: Reward, evaluation: Evaluation | None, environment: EnvironmentSettings | None
) -> Iterator[Problem]:
    """An evaluation has functions, a reward model, a judge or an environment."""
    if reward.judge_model is not None:
        return
    if environment is not None and environment.name not in _WITHOUT_REWARD:
        return
    if evaluation is not None and not evaluation.functions and not placed(groups, "reward"):
        otherwise = "place the role reward" if isinstance(evaluation, HeldOut) else "remove evaluation"
        rule = "needs something to measure: evaluation.functions or a reward model"
        yield Problem("evaluation.functions", "[]", rule, f"give evaluation.functions, or {otherwise}")


def evaluations_weigh_nothing(evaluation: Evaluation | None) -> Iterator[Problem]:
    """An evaluation reports each function by itself, without a weight."""
    where = "in an evaluation, which reports each function by itself"
    for index, function in enumerate(() if evaluation is None else evaluation.functions):
        field = f"evaluation.functions.{index}"
        yield from ineffective_settings(field, function, ("weight",), where, "or name it in reward")


def functions_have_their_calls(reward: Reward, evaluation: Evaluation | None) -> Iterator[Problem]:
    """Built-in functions score one response with MegaRL's signature; a cache and an adapter fit what a call scores.

    Calls of the judge alone overlap.
    """
    evaluated = () if evaluation is None else evaluation.functions
    for section, functions in (("reward", reward.functions), ("evaluation", evaluated)):
        for index, function in enumerate(functions):
            field = f"{section}.functions.{index}"
            if ":" not in function.name:
                names = ("adapter", "per") if function.name == "judge" else ("adapter", "per", "concurrency")
                where = "with a built-in function"
                yield from ineffective_settings(field, function, names, where, "or name a function of your own")
                continue
            if function.cache and function.unit == "group":
                rule = "false with per: group, where a score depends on the other responses"
                yield Problem(f"{field}.cache", "True", rule, "set it to false, or per to batch")
            takes = {"trl": ("batch", "group"), "verl": ("response", "batch")}.get(function.adapter or "")
            if takes is not None and function.unit not in takes:
                rule = f"{' or '.join(takes)} with adapter {function.adapter}"
                yield Problem(f"{field}.per", function.unit, rule, "choose one of them, or set adapter to null")


def evaluations_sample(evaluation: Evaluation | None) -> Iterator[Problem]:
    """Greedy answers have no temperature and are one a prompt; pass@k needs k answers."""
    if evaluation is None:
        return
    if evaluation.greedy:
        where = "with evaluation.greedy"
        otherwise = "or set evaluation.greedy to false"
        yield from ineffective_settings("evaluation", evaluation, ("temperature",), where, otherwise)
        if evaluation.samples_per_prompt > 1:
            rule = "1 with evaluation.greedy: the answers to a prompt would all be the same"
            value = str(evaluation.samples_per_prompt)
            fix = "set it to 1, or evaluation.greedy to false"
            yield Problem("evaluation.samples_per_prompt", value, rule, fix)
    if not evaluation.pass_at:
        where = "without evaluation.pass_at"
        yield from ineffective_settings("evaluation", evaluation, ("success_at",), where, "or give some")
    elif max(evaluation.pass_at) > evaluation.samples_per_prompt:
        rule = f"at most evaluation.samples_per_prompt = {evaluation.samples_per_prompt}"
        value = shown(list(evaluation.pass_at))
        fix = f"set samples_per_prompt to {max(evaluation.pass_at)} or more"
        yield Problem("evaluation.pass_at", value, rule, fix)
