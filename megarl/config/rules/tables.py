"""Rules that compare the values of a few fields, as tables."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from pydantic import BaseModel

from megarl.config.problems import Broken, Problem, ineffective_settings, shown
from megarl.config.schema import Choice


def given(value: Any) -> bool:
    return value is not None


def positive(value: Any) -> bool:
    return value is not None and value > 0


def one_or_more(value: Any) -> bool:
    return value is not None and value >= 1


def several(value: Any) -> bool:
    return value is not None and value > 1


def interpolated(value: Any) -> bool:
    return value in ("loglinear", "linear")


class Unused(NamedTuple):
    """Settings that have no effect with a value of another field.

    Args:
        settings: names of fields of a section.
        field: path of the other field, within the section if it begins with a dot; or a fact.
        value: value of the other field.
        otherwise: what to do instead of removing the settings.
        reason: why they have no effect.
    """

    settings: str
    field: str
    value: object
    otherwise: str
    reason: str = ""


_NORMALISER = "algo.normalise.advantages"
_BY_GROUP = (
    f"at least 2 with {_NORMALISER} over the samples of a prompt",
    "set it to 2 or more, or normalise over the batch",
)
_ALL_THE_SAME = (
    "1 with rollout.top_k = 1: the answers to a prompt would all be the same",
    "set it to 1, or rollout.top_k to null",
)
# facts, which `broken_rules` adds to the values of fields
TRAINING: Final = "training on scores"
ROLLOUT_TRAINING: Final = "training on rollouts"
SCORED_ROLLOUTS: Final = "rollouts that are scored"
TOKEN_REWARDS: Final = "an advantage of token rewards"
_REWARD_ROLE = "the role reward"
_ALONE = "as an evaluation reports each source by itself"
_RECOMPUTE = "recompute the old log-probabilities"
_OPTIMIZER = [
    Unused("warmup final_lr", ".schedule", "anneal", "choose linear", "from lr to 0"),
    Unused("final_lr", ".schedule", "constant", "choose linear or cosine"),
]
_LORA = [Unused("init seed", ".path", given, "set path to null", "from which adapters are read")]
UNUSED: Final[Mapping[str, list[Unused]]] = {
    "actor.lora": _LORA,
    "actor.optimizer": _OPTIMIZER,
    "algo": [
        Unused("filter_rounds", ".filter", None, "choose a filter"),
        Unused("early_stop", ".ppo_epochs", 1, "raise algo.ppo_epochs"),
        Unused("value_loss", "critic", None, "choose gae"),
        Unused("correction early_stop normalise", ".policy_loss", "sft", "choose another policy loss"),
    ],
    "algo.advantage": [Unused("length_alpha", ".lam_policy", given, "set lam_policy to null")],
    "algo.correction": [
        Unused("reject m2po weights", ".old_logprobs", "rollout", _RECOMPUTE, "where the ratio to the engines is 1"),
        Unused("reject m2po", ".old_logprobs", "loglinear", _RECOMPUTE, "which are known in the update alone"),
        Unused("reject m2po", ".old_logprobs", "linear", _RECOMPUTE, "which are known in the update alone"),
    ],
    "algo.kl": [
        Unused("target horizon unit cumulative importance reference_sync", ".coef", 0, "raise algo.kl.coef"),
        Unused("horizon unit", ".target", None, "set a target"),
        Unused("cumulative", ".in", "loss", "set algo.kl.in to reward"),
        Unused("cumulative", TOKEN_REWARDS, True, "choose rloo", "which adds up rewards by itself"),
        Unused("importance", ".in", "reward", "set algo.kl.in to loss"),
        Unused("importance", ".estimator", "full", "set algo.kl.estimator to k3", "which is no estimate from samples"),
    ],
    "algo.kl.estimator": [
        Unused("mix", ".form", "reverse", "set form to jsd"),
        Unused("mix", ".form", "forward", "set form to jsd"),
    ],
    "algo.normalise": [Unused("rewards", TOKEN_REWARDS, False, "choose gae")],
    "algo.normalise.advantages": [
        Unused("ddof form eps", ".mean_only", True, "set mean_only to false", "which does not divide"),
        Unused("leave_one_out", ".mean", None, "set mean to batch or group"),
        Unused("unbiased eps", ".std", None, "set std to batch or group"),
    ],
    "algo.scores": [
        Unused("placement", TOKEN_REWARDS, False, "choose gae"),
        Unused("placement", "reward.dense", given, "set reward.dense to null"),
        Unused("clip", "algo.advantage", "gdpo", "choose grpo", "which compares the score of each source as it is"),
    ],
    "cluster": [Unused("min_nodes", ".address", None, "set cluster.address", "where all nodes are this machine")],
    "critic": [
        Unused("head_std head_seed", ".head", "loaded", "set critic.head to new"),
        Unused("head_seed", ".head_std", 0, "raise critic.head_std"),
    ],
    "critic.lora": _LORA,
    "critic.optimizer": _OPTIMIZER,
    "data": [
        Unused("score_range", ".curriculum", "uniform", "choose another curriculum"),
        Unused("tasks", "environment", None, "give environment", "which would make them"),
        Unused("evaluate_every", ".evaluation", None, "give data.evaluation"),
    ],
    "evaluation": [
        Unused("tasks", "environment", None, "give environment", "which would make them"),
        Unused("first_task", ".tasks", None, "give evaluation.tasks"),
        Unused("chat_template too_long", ".tasks", given, "give evaluation.prompts", "and no rows that are read"),
        Unused("temperature", ".greedy", True, "set evaluation.greedy to false"),
        Unused("success_at", ".pass_at", (), "give some"),
    ],
    "environment": [Unused("weight", TRAINING, False, "use stage ppo", _ALONE)],
    "reward": [
        Unused("weight functions dense shuffle", TRAINING, False, "name evaluation.functions", _ALONE),
        Unused("path head_std head_seed weight dense", _REWARD_ROLE, False, "add the role to a group"),
        Unused("head_std head_seed", ".path", given, "remove the path", "whose head is loaded"),
        Unused("dense", TOKEN_REWARDS, False, "choose gae"),
    ],
    "reward.judge_model": [Unused("weight", TRAINING, False, "use stage ppo", _ALONE)],
    "reward.loss": [Unused("margin", ".kind", "logexp", "set kind to logsigmoid")],
    "reward.lora": _LORA,
    "reward.optimizer": _OPTIMIZER,
    "resharding": [Unused("adapters", "actor.lora", None, "give actor.lora")],
    "rollout": [
        Unused(
            "record replay sync_every max_staleness mode inflight_cache rolling_update"
            " max_replacements inference_parts",
            ROLLOUT_TRAINING,
            False,
            "use stage ppo",
        ),
        Unused("kv_cache_mib", ".gpu_memory_fraction", given, "set rollout.gpu_memory_fraction to null"),
        Unused("min_new_tokens", ".ignore_eos", True, "set rollout.ignore_eos to false"),
        Unused("enforce_eager", "cluster.device", "cpu", "use GPUs"),
        Unused("mode", ".max_staleness", 0, "raise rollout.max_staleness"),
        Unused("inflight_cache", ".mode", "exact", "set rollout.mode to inflight"),
        Unused("inflight_cache", ".mode", "bounded", "set rollout.mode to inflight"),
        Unused("rolling_update", ".mode", "exact", "set rollout.mode to bounded or inflight"),
    ],
    "tracking": [
        Unused("samples samples_mib tokens", SCORED_ROLLOUTS, False, "use stage ppo"),
        Unused("samples_mib tokens", ".samples", 0, "raise tracking.samples"),
    ],
}
"""The settings of each section; of several entries that hold for a setting, the first one is reported."""
READ_TEXT: Final = {
    "rollout.stop": "use rollout.stop_token_ids",
    "data.chat_template": "set it to false",
    "evaluation.chat_template": "set it to false",
    "ptx.chat_template": "set it to false",
    "environment": "remove it",
    "reward.judge_model": "remove it",
}
"""Settings that need a tokenizer, which a random model does not have by itself, and what to do instead."""
ORDERED: Final = (
    ("algo.correction.weights.lower", "below", "algo.correction.weights.upper"),
    ("algo.filter.low", "below", "algo.filter.high"),
    ("algo.scores.truncate_at.after", "below", "rollout.max_new_tokens"),
    ("cluster.min_nodes", "below", "cluster.nodes"),
    ("data.curriculum.hard", "at most", "data.curriculum.easy"),
    ("data.random.count", "at least", "data.prompts_per_step"),
    ("data.random.min_tokens", "at most", "data.random.max_tokens"),
    ("data.tasks", "at least", "data.prompts_per_step"),
    ("environment.time_limit", "at most", "cluster.time_limits.rollout"),
    ("reward.judge_model.max_new_tokens", "below", "reward.judge_model.max_model_len"),
    ("rollout.min_new_tokens", "at most", "rollout.max_new_tokens"),
)
"""Fields that are below, at most or at least another one; null is in order."""
EXACTLY_ONE: Final = (
    ("model", ("path", "random"), "give model.path, or model.random, and set the other to null"),
    ("data", ("prompts", "random", "tasks"), "give one of them, and set the others to null"),
    ("evaluation", ("prompts", "tasks"), "give evaluation.prompts, or tasks of an environment"),
)
"""Sections, the fields of which exactly one is given, and the fix."""
CONFLICTS: Final[tuple[tuple[Mapping[str, Any], str, str], ...]] = (
    # of algorithms
    (
        {"algo.select": given, "ptx": given},
        "null with ptx, whose texts are in every optimizer step, selected samples or not",
        "set one of them to null",
    ),
    (
        {"algo.select": given, "reward.dense": given},
        "null with reward.dense: samples are selected by the scores of responses",
        "set one of them to null",
    ),
    (
        {"algo.filter": given, "reward.dense": given},
        "null with reward.dense: prompts are filtered by the scores of responses",
        "set one of them to null",
    ),
    (
        {"algo.scores.truncate_at": given, "reward.dense": given},
        "null with reward.dense, which scores every token",
        "set one of them to null",
    ),
    (
        {"algo.scores.truncate_at": given, "environment": given},
        "null with an environment, whose reward is that of the whole conversation",
        "remove it",
    ),
    (
        {"reward.shuffle": True, "reward.dense": given},
        "false with reward.dense, whose scores fit no other response",
        "set it to false",
    ),
    (
        {"algo.kl.coef": positive, "algo.policy_loss": "sft"},
        "0 with policy loss sft, the likelihood of samples",
        "set it to 0, and remove the role reference",
    ),
    (
        {"algo.kl.estimator": "k1", "algo.kl.in": "loss", "algo.kl.coef": positive},
        "k2, k3, k1+, k3+, abs or full with algo.kl.in = loss, where the gradient of k1 is 0 on average",
        "set it to k3 or k1+, or set algo.kl.in to reward",
    ),
    (
        {"algo.kl.estimator": "full", "algo.kl.in": "reward", "algo.kl.coef": positive},
        "of the sampled token with algo.kl.in = reward; full needs the whole distribution",
        "set it to k1, or set algo.kl.in to loss",
    ),
    (
        {"algo.kl.estimator": "k1+", "algo.kl.in": "reward", "algo.kl.coef": positive},
        "without + with algo.kl.in = reward: k1+ differs from k1 in its gradient alone",
        "set it to k1, or set algo.kl.in to loss",
    ),
    (
        {"algo.kl.estimator": "k3+", "algo.kl.in": "reward", "algo.kl.coef": positive},
        "without + with algo.kl.in = reward: k3+ differs from k3 in its gradient alone",
        "set it to k3, or set algo.kl.in to loss",
    ),
    (
        {_NORMALISER: "levels", f"{_NORMALISER}.mean": None, f"{_NORMALISER}.std": None},
        "must shift or scale: mean or std must not be null",
        "choose none, which leaves the advantages",
    ),
    (
        {
            "algo.correction.old_logprobs": interpolated,
            "rollout.max_staleness": 0,
            "rollout.sync_every": 1,
        },
        "recompute or rollout where no rollout is older than the actor",
        "set it to recompute, or raise rollout.max_staleness or rollout.sync_every",
    ),
    (
        {
            "algo.correction.weights.batch_normalise": True,
            "algo.correction.old_logprobs": interpolated,
        },
        "false with interpolated algo.correction.old_logprobs, which change in each micro-batch",
        "set it to false, or recompute the old log-probabilities",
    ),
    (
        {
            "algo.policy_loss": "reinforce",
            "rollout.max_staleness": positive,
            "algo.correction.weights": None,
        },
        "a loss with a clip where rollout.max_staleness is above 0; reinforce has none",
        "choose ppo or another with a clip, or bound the ratio with algo.correction.weights",
    ),
    (
        {"reward.shuffle": True, "environment": given, TOKEN_REWARDS: True},
        f"false with an environment and {TOKEN_REWARDS}, which places the rewards of turns",
        "set it to false, or choose grpo",
    ),
    (
        {"reward.path": None, _REWARD_ROLE: True, "model.path": given},
        "a reward model with model.path: a random head on that model would score at random",
        "give it, or remove the role reward from its group",
    ),
    # of samples
    (
        {"data.samples_per_prompt": 1, "algo.select.by": "local"},
        "at least 2 with algo.select.by = local, which selects the best sample of each prompt",
        "set it to 2 or more",
    ),
    (
        {"data.samples_per_prompt": 1, "algo.filter": "nonzero_std"},
        "at least 2 with algo.filter = nonzero_std: a sample alone has no deviation",
        "set it to 2 or more",
    ),
    ({"data.samples_per_prompt": 1, _NORMALISER: "grouped_tokens"}, *_BY_GROUP),
    ({"data.samples_per_prompt": 1, f"{_NORMALISER}.mean": "group"}, *_BY_GROUP),
    ({"data.samples_per_prompt": 1, f"{_NORMALISER}.std": "group"}, *_BY_GROUP),
    ({"data.samples_per_prompt": several, "rollout.top_k": 1}, *_ALL_THE_SAME),
    ({"evaluation.samples_per_prompt": several, "rollout.top_k": 1}, *_ALL_THE_SAME),
    (
        {"evaluation.samples_per_prompt": several, "evaluation.greedy": True},
        "1 with evaluation.greedy: the answers to a prompt would all be the same",
        "set it to 1, or set evaluation.greedy to false",
    ),
    (
        {"evaluation.tasks": given, "environment": given, "data.tasks": None},
        "must follow data.tasks, which is null",
        "give data.tasks, or evaluation.prompts: a file of rows with an index",
    ),
    (
        {"evaluation.first_task": None, "evaluation.tasks": given},
        "given with evaluation.tasks: the training had the indices below its data.tasks",
        "set it to data.tasks of the training, or to 0 if there was none",
    ),
    (
        {"data.random": given, "environment": given},
        "null with an environment, which reads text",
        "give data.prompts, or data.tasks of which the environment makes prompts",
    ),
    # of training
    (
        {"run.steps": None, "run.epochs": None},
        "run.steps or run.epochs must be given",
        "set the number of steps, or of passes over the rows",
    ),
    (
        {"critic.head": "loaded", "critic.path": None},
        "needs critic.path",
        "set critic.path to a reward model, or critic.head to new",
    ),
    ({"ptx.coef": 0}, "above 0; it has no effect otherwise", "raise it, or remove it: ptx=null"),
    (
        {"ptx.coef": one_or_more, "ptx.mode": "convex"},
        "below 1 with ptx.mode = convex, which weighs the rollouts with the rest",
        "lower it, or set ptx.mode to add",
    ),
    (
        {"model.layers": "transformer_engine", "cluster.device": "cpu"},
        "Transformer Engine needs device cuda; on a CPU, layers are Megatron's own",
        "set it to auto or local",
    ),
    # of engines
    (
        {"rollout.ignore_eos": True, "environment": given},
        "false with an environment: the end token shows that a turn is whole",
        "set it to false",
    ),
    (
        {"rollout.record": given, "rollout.replay": given, ROLLOUT_TRAINING: True},
        "must not be given together with rollout.replay",
        "set one of them to null",
    ),
    (
        {"rollout.sync_every": several, "rollout.sleep": True, "checkpoint": given},
        "1 with rollout.sleep",
        "set it to 1, or give the engines devices of their own and set rollout.sleep to false",
    ),
    (
        {"rollout.sync_every": several, "rollout.max_staleness": positive, "resharding": given},
        "1 with rollout.max_staleness, which bounds the age of the weights",
        "set it to 1",
    ),
    (
        {"evaluation.blocking": False, "rollout.max_staleness": 0},
        "true with rollout.max_staleness = 0",
        "set it to true, or raise rollout.max_staleness",
    ),
)
"""Values that may not be together, the rule for the first field, and the fix.

A function stands for the values for which it is true. A stage without one of the fields has no
conflict.
"""
_IN_ORDER: Final = {"below": operator.lt, "at most": operator.le, "at least": operator.ge}


def broken_tables(values: Mapping[str, Any]) -> Iterator[Broken]:
    """Yields what the tables forbid.

    Args:
        values: values of fields by path, and facts by their words; invalid sections are missing.
    """
    if "model" in values and values["model.tokenizer"] is None and values["model.path"] is None:
        for field, instead in READ_TEXT.items():
            if values.get(field):
                yield field, "needs a tokenizer", f"set model.tokenizer, or {instead}"
    for section, names, fix in EXACTLY_ONE:
        fields = {name: values.get(f"{section}.{name}") for name in names}
        chosen = [name for name, value in fields.items() if value is not None]
        if f"{section}.{names[0]}" in values and len(chosen) != 1:
            rule = f"exactly one of {', '.join(names[:-1])} and {names[-1]} must be given"
            yield Problem(section, " and ".join(chosen) or "none", rule, fix)
    for conflict, rule, fix in CONFLICTS:
        if all(path in values and _is_so(values[path], value) for path, value in conflict.items()):
            yield next(iter(conflict)), rule, fix
    yield from _unordered(values)
    yield from _unused(values)


def _unordered(values: Mapping[str, Any]) -> Iterator[Broken]:
    for field, relation, other in ORDERED:
        value = values.get(field)
        limit = values.get(other)
        if value is None or limit is None or _IN_ORDER[relation](value, limit):
            continue
        fix = f"lower it, or raise {other}"
        if relation == "at least":
            fix = f"raise it, or lower {other}"
        yield field, f"{relation} {other} = {shown(limit)}", fix


def _unused(values: Mapping[str, Any]) -> Iterator[Broken]:
    for path, rows in UNUSED.items():
        section = values.get(path)
        for row in rows:
            field = path + row.field if row.field.startswith(".") else row.field
            if isinstance(section, BaseModel) and field in values and _is_so(values[field], row.value):
                names = [name for name in row.settings.split() if name in type(section).model_fields]
                where = condition(field, row.value)
                if row.reason:
                    where += f", {row.reason}"
                yield from ineffective_settings(path, section, names, where, f"or {row.otherwise}")


def _is_so(value: object, expected: Any) -> bool:
    if callable(expected):
        return bool(expected(value))
    if isinstance(value, Choice):
        return value.name == expected
    return value == expected


def condition(field: str, value: object) -> str:
    """Returns the words for a value of a field, as in "has no effect without algo.filter"."""
    if value is None or value is False or value == ():
        return f"without {field}"
    if value is given or value is True:
        return f"with {field}"
    return f"with {field} = {shown(value)}"
