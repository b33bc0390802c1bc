"""Rules of reward models and functions, of scores, and of evaluations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megarl.config.problems import Problem, ineffective_settings, shown
from megarl.config.rules.model_rules import known
from megarl.config.rules.placement_rules import placed
from megarl.config.schema import Algo, Cluster, Evaluation, Group, HeldOut, Model, Reward, Rollout, Scores

Groups = Mapping[str, Group]


def scores_have_a_source(groups: Groups, reward: Reward) -> Iterator[Problem]:
    """Something scores the responses."""
    if not placed(groups, "reward") and not reward.functions:
        fix = "add reward to the roles of a group, or give reward.functions"
        rule = "a group has the role reward, or reward.functions has a rule"
        yield Problem("reward", "nothing scores", rule, fix)
    elif not any(weight for weight in _weights(groups, reward)):
        rule, fix = "one that is not 0: nothing could be learnt", "raise reward.weight, or that of a function"
        yield Problem("reward", "all weights 0", rule, fix)


def reward_settings_have_their_model(groups: Groups, reward: Reward) -> Iterator[Problem]:
    """A head's initialisation is given for a random head alone, and the rest of a reward model for the role."""
    if not placed(groups, "reward"):
        names = ("path", "head_std", "head_seed", "weight", "dense")
        yield from ineffective_settings(
            "reward", reward, names, "without the role reward", "or add the role to a group"
        )
    elif reward.path is not None:
        names = ("head_std", "head_seed")
        yield from ineffective_settings(
            "reward", reward, names, "with reward.path, whose head is loaded", "or remove the path"
        )


def reward_heads_have_a_source(groups: Groups, model: Model, reward: Reward) -> Iterator[Problem]:
    """A language model's checkpoint has no score head; a random one is for trials with a random model."""
    if placed(groups, "reward") and model.path is not None and reward.path is None:
        rule = "a reward model with model.path: a random head on that model would score at random"
        fix = "give it, or remove the role reward from its group"
        yield Problem("reward.path", "null", rule, fix)


def processes_have_functions(reward: Reward, evaluation: Evaluation | None) -> Iterator[Problem]:
    """The processes run rules."""
    if not reward.functions and (evaluation is None or not evaluation.functions):
        names = ("processes", "time_limit", "retries")
        yield from ineffective_settings("reward", reward, names, "without functions", "or give reward.functions")


def calls_end_in_time(cluster: Cluster, reward: Reward, evaluation: Evaluation | None) -> Iterator[Problem]:
    """A call of a rule may take as long as all calls of a step together, and no longer."""
    most = cluster.time_limits.calls
    if (reward.functions or (evaluation is not None and evaluation.functions)) and reward.time_limit > most:
        rule = f"at most {most:g}, nine tenths of cluster.time_limits.scoring, which all calls of a step have together"
        fix = "lower it, or raise cluster.time_limits.scoring"
        yield Problem("reward.time_limit", f"{reward.time_limit:g}", rule, fix)


def shaped_scores_are_compared(algo: Algo) -> Iterator[Problem]:
    """What is done to the score of a response reaches the comparison."""
    if algo.advantage.name != "gdpo":
        return
    masks = algo.scores.missing_end is not None and algo.scores.missing_end.name == "mask"
    where = "with advantage gdpo, which compares the score of each source as it is"
    yield from ineffective_settings(
        "algo.scores", algo.scores, ("clip",) if masks else ("clip", "missing_end"), where, "or choose grpo"
    )


def masked_comparisons_mask(algo: Algo) -> Iterator[Problem]:
    """Responses that did not end are not compared, and must not teach."""
    missing = algo.scores.missing_end
    if algo.advantage.name == "masked_rloo" and (missing is None or missing.name != "mask"):
        value = "null" if missing is None else missing.name
        rule = "mask with advantage masked_rloo, which compares the responses that ended alone"
        yield Problem("algo.scores.missing_end", value, rule, "set it to mask, or choose rloo")


def dense_scores_are_read(algo: Algo, reward: Reward) -> Iterator[Problem]:
    """Scores after every token are rewards of tokens."""
    if reward.dense is None:
        return
    if not algo.of_tokens:
        where = f"with advantage {algo.advantage.name}, which compares scores"
        yield from ineffective_settings("reward", reward, ("dense",), where, "or choose gae")
    yield from ineffective_settings(
        "algo.scores", algo.scores, ("placement",), "with reward.dense", "or set reward.dense to null"
    )
    if algo.filter is not None:
        rule, fix = "null with reward.dense: prompts are filtered by the scores of responses", "set one of them to null"
        yield Problem("algo.filter", algo.filter.name, rule, fix)
    if algo.scores.truncate_at is not None:
        rule, fix = "null with reward.dense, which scores every token", "remove it, or set reward.dense to null"
        yield Problem("algo.scores.truncate_at", "given", rule, fix)
    if reward.shuffle:
        rule, fix = "false with reward.dense, whose scores fit no other response", "set it to false"
        yield Problem("reward.shuffle", "True", rule, fix)


def scores_end_within_responses(model: Model, rollout: Rollout, algo: Algo) -> Iterator[Problem]:
    """The token at which responses are cut for scoring can be there."""
    yield from _truncation("algo.scores", algo.scores, model, rollout)


def selections_read_scores(model: Model, rollout: Rollout, scores: Scores, reward: Reward) -> Iterator[Problem]:
    """A selection sees no rewards of tokens."""
    yield from _truncation("scores", scores, model, rollout)
    yield from ineffective_settings(
        "scores", scores, ("placement",), "in stage raft, which has no rewards of tokens", "or use ppo"
    )
    yield from ineffective_settings(
        "reward", reward, ("dense",), "in stage raft, which has no rewards of tokens", "or use ppo"
    )
    if scores.missing_end is not None and scores.missing_end.name == "mask":
        rule, fix = "not mask in stage raft", "set it to null, and raft.discard_unfinished to true"
        yield Problem("scores.missing_end", "mask", rule, fix)


def evaluations_report_something(groups: Groups, evaluation: Evaluation | None) -> Iterator[Problem]:
    """Held-out answers are scored."""
    if evaluation is not None and not evaluation.functions and not placed(groups, "reward"):
        otherwise = "place the role reward" if isinstance(evaluation, HeldOut) else "remove evaluation"
        fix = f"give evaluation.functions, or {otherwise}"
        rule = "has rules to report, or a group has the role reward"
        yield Problem("evaluation.functions", "[]", rule, fix)


def evaluations_weigh_nothing(evaluation: Evaluation | None) -> Iterator[Problem]:
    """Every rule of an evaluation is reported by itself."""
    for index, function in enumerate(() if evaluation is None else evaluation.functions):
        where = "in an evaluation, which reports each function by itself"
        yield from ineffective_settings(
            f"evaluation.functions.{index}", function, ("weight",), where, "or name it in reward"
        )


def evaluations_sample(evaluation: Evaluation | None) -> Iterator[Problem]:
    """The likeliest answer is one, whatever the temperature; passes are estimated from as many answers as they need."""
    if evaluation is None:
        return
    if evaluation.greedy:
        where = "with evaluation.greedy"
        yield from ineffective_settings(
            "evaluation", evaluation, ("temperature",), where, "or set evaluation.greedy to false"
        )
        if evaluation.samples_per_prompt > 1:
            rule = "1 with evaluation.greedy: the answers to a prompt would all be the same"
            value, fix = str(evaluation.samples_per_prompt), "set it to 1, or evaluation.greedy to false"
            yield Problem("evaluation.samples_per_prompt", value, rule, fix)
    if not evaluation.pass_at:
        yield from ineffective_settings(
            "evaluation", evaluation, ("success_at",), "without evaluation.pass_at", "or give some"
        )
    elif max(evaluation.pass_at) > evaluation.samples_per_prompt:
        rule = f"at most evaluation.samples_per_prompt = {evaluation.samples_per_prompt}"
        value, fix = shown(list(evaluation.pass_at)), f"set samples_per_prompt to {max(evaluation.pass_at)} or more"
        yield Problem("evaluation.pass_at", value, rule, fix)


def nothing_is_learnt(reward: Reward) -> Iterator[Problem]:
    """An evaluation by itself reports its sources one by one."""
    where = "in stage eval, which reports each source by itself"
    otherwise = "or name functions in evaluation.functions"
    yield from ineffective_settings("reward", reward, ("weight", "functions", "dense", "shuffle"), where, otherwise)


def _weights(groups: Groups, reward: Reward) -> Iterator[float]:
    """Of everything that scores."""
    if placed(groups, "reward"):
        yield reward.weight
    yield from (function.weight for function in reward.functions)


def _truncation(field: str, scores: Scores, model: Model, rollout: Rollout) -> Iterator[Problem]:
    """A token that is no token, or a response that is never so long."""
    cut = scores.truncate_at
    if cut is None:
        return
    used = model.vocab_size or (known(model) or {}).get("vocab_size")
    if isinstance(used, int) and cut.token >= used:
        rule = f"below {used}, the number of ids in use: others are never sampled"
        yield Problem(f"{field}.truncate_at.token", str(cut.token), rule, "correct it")
    if cut.after >= rollout.max_new_tokens:
        rule = f"below rollout.max_new_tokens = {rollout.max_new_tokens}"
        yield Problem(f"{field}.truncate_at.after", str(cut.after), rule, "lower it")


RULES = (
    reward_settings_have_their_model,
    reward_heads_have_a_source,
    processes_have_functions,
    calls_end_in_time,
    evaluations_report_something,
    evaluations_weigh_nothing,
    evaluations_sample,
)
"""Of every stage that scores responses."""
