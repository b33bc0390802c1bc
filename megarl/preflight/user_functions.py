"""Checks that the functions that a configuration names exist and accept the calls of the run."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from megarl.algos.registry import KINDS
from megarl.config import RunConfig
from megarl.config.problems import Problem, shown
from megarl.config.schema import CustomFunction, RewardFunction, Section
from megarl.config.schema.questions import columns_of_template
from megarl.plugins import Function, check_options, resolve, suggestion
from megarl.rewards.adapters import check_signature, likely_adapter, required_columns
from megarl.rewards.functions import RULES, TOKEN_RULES, labels
from megarl.rewards.functions import resolve as resolve_reward
from megarl.types import Prompt

_FIX = "correct it; docs/rewards.md describes the functions"
_TAKEN = (
    "prompts",
    "response_length",
    "response_length_max",
    "judge_model",
    "reward_model",
    "samples",
    "score",
    "truncated_fraction",
    "unscored",
)
"""Other sources of a score, and metrics that are reported beside those of the functions."""


def check_functions(
    functions: Sequence[RewardFunction],
    *,
    where: str = "reward.functions",
    tokenizer: bool = True,
    longest: int | None = None,
) -> list[Problem]:
    """Imports reward functions and checks their arguments against their signatures, without calling them.

    Args:
        where: the field of the functions.
        tokenizer: whether the run has one.
        longest: tokens of the longest possible response; None if unknown.
    """
    problems: list[Problem] = []
    for index, function in enumerate(functions):
        problems += _problems(function, f"{where}.{index}", tokenizer=tokenizer, longest=longest)
    names = labels(functions)
    if len(set(names)) < len(names):
        rule = "names that differ, once those of one name are numbered"
        problems.append(Problem(field=where, value=", ".join(names), rule=rule, fix="give your functions other names"))
    return problems


def check_fields(
    functions: Sequence[RewardFunction], prompts: Sequence[Prompt], *, where: str = "reward.functions"
) -> list[Problem]:
    """Checks that every prompt has the fields that the built-in functions and those with an adapter read."""
    problems: list[Problem] = []
    for index, function in enumerate(functions):
        own = _field_argument(function)
        place, fields = ("args.field", (own,)) if own is not None else _columns(function)
        found = [problem for field in fields for problem in missing_column(f"{where}.{index}.{place}", field, prompts)]
        if function.adapter is not None:  # the setting does not name the columns: the function's signature does
            found = [replace(problem, field=f"{where}.{index}.name", value=function.name) for problem in found]
        problems += found
    return problems


def missing_column(where: str, column: str, prompts: Sequence[Prompt]) -> Iterator[Problem]:
    """Checks that every prompt has a column, which the setting `where` names."""
    lacking = [prompt for prompt in prompts if column not in prompt.fields]
    if not lacking:
        return
    count = f"{len(lacking)} of {len(prompts)}"
    first = lacking[0]
    rule = f"a field of every prompt; {count} lack it, the first is {first.prompt_id!r}"
    known = ", ".join(first.fields)
    fix = f"name one that it has ({known})" if known else "add the column to the rows of the prompts"
    if where.endswith(".adapter"):
        fix = f"add the column, or rename one with columns: {{{column}: ...}}" + (f" ({known})" if known else "")
        rule = f"reads the column {column}, {rule}"
    yield Problem(field=where, value=column, rule=rule, fix=fix)


def _columns(function: RewardFunction) -> tuple[str, tuple[str, ...]]:
    """Returns the columns of rows that a judge or a function with an adapter reads, below the setting that says so."""
    if function.name == "judge":
        return "args.template", columns_of_template(function.args["template"])
    return "adapter", required_columns(function, resolve_reward(function.name)) if function.adapter is not None else ()


def _problems(function: RewardFunction, where: str, *, tokenizer: bool, longest: int | None) -> Iterator[Problem]:
    try:
        target = resolve_reward(function.name)
    except ValueError as error:
        usual = "name a built-in function, or one that can be imported from the working directory; see docs/rewards.md"
        near = difflib.get_close_matches(function.name, RULES, n=1)
        fix = f"did you mean {near[0]}?" if near else suggestion(function.name) or usual
        yield Problem(field=f"{where}.name", value=function.name, rule=str(error), fix=fix)
        return
    if labels([function])[0] in _TAKEN:
        rule = f"none of {', '.join(_TAKEN)}, which are names of other metrics"
        yield Problem(field=f"{where}.name", value=function.name, rule=rule, fix="give your function another name")
    try:
        check_signature(function, target)
    except ValueError as error:
        fix = adapter_fix(function, target) or _FIX
        yield Problem(field=f"{where}.args", value=shown(dict(function.args)), rule=str(error), fix=fix)
        return
    if function.name == "math_verify" and find_spec("math_verify") is None:
        fix = "install it with pip install 'megarl-trainer[math]'"
        yield Problem(field=f"{where}.name", value=function.name, rule="needs the package math-verify", fix=fix)
    if function.name in RULES:
        wrong = list(_values(target, function.args, f"{where}.args"))
        yield from wrong or _overlong(function, f"{where}.args", longest)
        if function.name not in TOKEN_RULES and not tokenizer:
            fix = "set model.tokenizer, or choose a function that reads token ids"
            yield Problem(field=f"{where}.name", value=function.name, rule="reads text: needs a tokenizer", fix=fix)


def adapter_fix(function: RewardFunction, target: Function) -> str | None:
    """Returns the fix for a function that is called with one completion and has the parameters of another system's."""
    likely = likely_adapter(target) if function.adapter is None and function.unit == "response" else None
    return None if likely is None else f"set adapter: {likely}, whose parameters the function has"


def _values(function: Function, args: Mapping[str, Any], where: str) -> Iterator[Problem]:
    """Finds arguments that the annotations of a built-in function do not accept."""
    hints = get_type_hints(function, include_extras=True)
    for name, value in args.items():
        try:
            TypeAdapter(hints[name]).validate_python(value, strict=True)
        except ValidationError as error:
            rule = error.errors()[0]["msg"].removeprefix("Value error, ").removeprefix("Input ")
            yield Problem(field=f"{where}.{name}", value=shown(value), rule=rule, fix=_FIX)


def _overlong(function: RewardFunction, where: str, longest: int | None) -> Iterator[Problem]:
    """The penalty must start within a response, and be full at its largest length at the latest."""
    if function.name != "soft_overlong":
        return
    most = function.args["max_tokens"]
    rising = function.args["buffer_tokens"]
    if rising > most:
        rule = f"at most max_tokens = {most}: the penalty would start before the response"
        yield Problem(field=f"{where}.buffer_tokens", value=str(rising), rule=rule, fix=f"set it to {most} or less")
    if longest is not None and most > longest:
        rule = f"at most rollout.max_new_tokens = {longest}: no response is longer"
        yield Problem(field=f"{where}.max_tokens", value=str(most), rule=rule, fix=f"set it to {longest}")


def _field_argument(function: RewardFunction) -> str | None:
    """Returns the field of prompts that a built-in function reads, if any."""
    if function.name not in RULES:
        return None
    parameter = inspect.signature(RULES[function.name]).parameters.get("field")
    return None if parameter is None else function.args.get("field", parameter.default)


def check_own_functions(config: RunConfig) -> list[Problem]:
    """Imports the user's own algorithms and checks their arguments against their signatures, without calling them.

    Checks nothing without torch, as on a machine that only launches runs.
    """
    if find_spec("torch") is None:
        return []
    problems: list[Problem] = []
    for field, own in _find_own(config, ""):
        problems += _own_problems(config, field, own)
    return problems


def _find_own(section: Section, above: str) -> Iterator[tuple[str, CustomFunction]]:
    """Yields every function of the user in a section, with its field."""
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        field = f"{above}{info.alias or name}"
        if isinstance(value, CustomFunction):
            yield field, value
        elif isinstance(value, Section):
            yield from _find_own(value, f"{field}.")


def _is_set(config: RunConfig, field: str) -> bool:
    """Returns whether a switch of the configuration is on."""
    value: Any = config
    for name in field.split("."):
        value = getattr(value, name)
    return value is True


def _own_problems(config: RunConfig, field: str, own: CustomFunction) -> Iterator[Problem]:
    level = getattr(own, "level", None)
    (kind,) = (kind for kind in KINDS if kind.field == field and kind.level == level)
    try:
        function = resolve(own.name)
    except ValueError as error:
        usual = "name one that can be imported from the working directory; see docs/algorithms.md"
        yield Problem(field=f"{field}.name", value=own.name, rule=str(error), fix=suggestion(own.name) or usual)
        return
    given = [*kind.arguments]
    for name, switch in kind.further:
        if _is_set(config, switch):
            given.append(name)
    positional = 0 if kind.named else len(given)
    keywords = tuple(kind.reads(own.name)) if kind.named else kind.keywords
    try:
        check_options(function, own.args, name=own.name, positional=positional, given=keywords)
    except ValueError as error:
        calls = "it reads any of" if kind.named else "its first arguments are"
        fix = f"correct them; {calls} ({', '.join(given)}); see docs/algorithms.md"
        yield Problem(field=f"{field}.args", value=shown(dict(own.args)), rule=str(error), fix=fix)
