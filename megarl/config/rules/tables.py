"""Rules that compare the values of two fields, as tables."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from pydantic import BaseModel

from megarl.config.problems import Broken, ineffective_settings, shown
from megarl.config.schema import Choice

GIVEN: Final = object()
"""Stands for any value but null."""


class Unused(NamedTuple):
    """Settings that have no effect with a value of another field.

    Args:
        settings: names of fields of a section.
        field: path of the other field; within the section if it begins with a dot.
        value: value of the other field.
        otherwise: what to do instead of removing the settings.
        reason: why they have no effect.
    """

    settings: str
    field: str
    value: object
    otherwise: str
    reason: str = ""


_RECOMPUTE = "recompute the old log-probabilities"
_OPTIMIZER = [
    Unused("warmup final_lr", ".schedule", "anneal", "choose linear", "from lr to 0"),
    Unused("final_lr", ".schedule", "constant", "choose linear or cosine"),
]
UNUSED: Final[Mapping[str, list[Unused]]] = {
    "actor.optimizer": _OPTIMIZER,
    "algo": [
        Unused("filter_rounds", ".filter", None, "choose a filter"),
        Unused("early_stop", ".ppo_epochs", 1, "raise algo.ppo_epochs"),
        Unused("value_loss", "critic", None, "choose gae"),
        Unused("correction early_stop normalise", ".policy_loss", "sft", "choose another policy loss"),
    ],
    "algo.advantage": [Unused("length_alpha", ".lam_policy", GIVEN, "set lam_policy to null")],
    "algo.correction": [
        Unused("reject m2po weights", ".old_logprobs", "rollout", _RECOMPUTE, "where the ratio to the engines is 1"),
        Unused("reject m2po", ".old_logprobs", "loglinear", _RECOMPUTE, "which are known in the update alone"),
        Unused("reject m2po", ".old_logprobs", "linear", _RECOMPUTE, "which are known in the update alone"),
    ],
    "algo.kl": [
        Unused("target horizon unit cumulative importance reference_sync", ".coef", 0, "raise algo.kl.coef"),
        Unused("horizon unit", ".target", None, "set a target"),
        Unused("cumulative", ".in", "loss", "set algo.kl.in to reward"),
        Unused("importance", ".in", "reward", "set algo.kl.in to loss"),
        Unused("importance", ".estimator", "full", "set algo.kl.estimator to k3", "which is no estimate from samples"),
    ],
    "algo.normalise.advantages": [
        Unused("ddof form eps", ".mean_only", True, "set mean_only to false", "which does not divide"),
        Unused("leave_one_out", ".mean", None, "set mean to batch or group"),
        Unused("unbiased eps", ".std", None, "set std to batch or group"),
    ],
    "algo.scores": [
        Unused("placement", "reward.dense", GIVEN, "set reward.dense to null"),
        Unused("clip", "algo.advantage", "gdpo", "choose grpo", "which compares the score of each source as it is"),
    ],
    "cluster": [Unused("min_nodes", ".address", None, "set cluster.address", "where all nodes are this machine")],
    "critic": [
        Unused("head_std head_seed", ".head", "loaded", "set critic.head to new"),
        Unused("head_seed", ".head_std", 0, "raise critic.head_std"),
    ],
    "critic.optimizer": _OPTIMIZER,
    "data": [
        Unused("tasks", "environment", None, "give environment", "which would make them"),
        Unused("evaluate_every", ".evaluation", None, "give data.evaluation"),
    ],
    "evaluation": [
        Unused("tasks", "environment", None, "give environment", "which would make them"),
        Unused("first_task", ".tasks", None, "give evaluation.tasks"),
        Unused("chat_template too_long", ".tasks", GIVEN, "give evaluation.prompts", "and no rows that are read"),
        Unused("temperature", ".greedy", True, "set evaluation.greedy to false"),
        Unused("success_at", ".pass_at", (), "give some"),
    ],
    "reward": [Unused("head_std head_seed", ".path", GIVEN, "remove the path", "whose head is loaded")],
    "reward.loss": [Unused("margin", ".kind", "logexp", "set kind to logsigmoid")],
    "reward.optimizer": _OPTIMIZER,
    "rollout": [
        Unused("kv_cache_mib", ".gpu_memory_fraction", GIVEN, "set rollout.gpu_memory_fraction to null"),
        Unused("min_new_tokens", ".ignore_eos", True, "set rollout.ignore_eos to false"),
        Unused("enforce_eager", "cluster.device", "cpu", "use GPUs"),
        Unused("mode", ".max_staleness", 0, "raise rollout.max_staleness"),
        Unused("inflight_cache", ".mode", "exact", "set rollout.mode to inflight"),
        Unused("inflight_cache", ".mode", "bounded", "set rollout.mode to inflight"),
        Unused("rolling_update", ".mode", "exact", "set rollout.mode to bounded or inflight"),
    ],
    "tracking": [Unused("samples_mib tokens", ".samples", 0, "raise tracking.samples")],
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
    ("data.random.count", "at least", "data.prompts_per_step"),
    ("data.random.min_tokens", "at most", "data.random.max_tokens"),
    ("data.tasks", "at least", "data.prompts_per_step"),
    ("environment.time_limit", "at most", "cluster.time_limits.rollout"),
    ("reward.judge_model.max_new_tokens", "below", "reward.judge_model.max_model_len"),
    ("rollout.min_new_tokens", "at most", "rollout.max_new_tokens"),
)
"""Fields that are below, at most or at least another one; null is in order."""
_IN_ORDER: Final = {"below": operator.lt, "at most": operator.le, "at least": operator.ge}


def broken_tables(values: Mapping[str, Any]) -> Iterator[Broken]:
    """Yields what the tables forbid.

    Args:
        values: values of all fields by path; those of invalid sections may be missing.
    """
    yield from _without_tokenizer(values)
    yield from _unordered(values)
    yield from _unused(values)


def _without_tokenizer(values: Mapping[str, Any]) -> Iterator[Broken]:
    if "model" not in values or values["model.tokenizer"] is not None or values["model.path"] is not None:
        return
    for field, instead in READ_TEXT.items():
        if values.get(field):
            yield field, "needs a tokenizer", f"set model.tokenizer, or {instead}"


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


def _is_so(value: object, expected: object) -> bool:
    if expected is GIVEN:
        return value is not None
    if isinstance(value, Choice):
        return value.name == expected
    return value == expected


def condition(field: str, value: object) -> str:
    """Returns the words for a value of a field, as in "has no effect without algo.filter"."""
    if value is None or value == ():
        return f"without {field}"
    if value is GIVEN or value is True:
        return f"with {field}"
    return f"with {field} = {shown(value)}"
