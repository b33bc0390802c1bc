"""Checks that the functions that a configuration names exist and accept the calls of the run."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from operator import attrgetter
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from megarl.algos.registry import KINDS
from megarl.config import RolloutTrainingConfig, RunConfig
from megarl.config.problems import Problem, shown
from megarl.config.schema import CustomFunction, RewardFunction, Section
from megarl.config.schema.questions import template_columns
from megarl.plugins import Function, check_options, resolve, resolve_class, suggestion
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
    """Imports reward functions and checks their arguments, without calling them.

    Args:
        longest: number of tokens of the longest possible response; None if unknown.
    """
    problems: list[Problem] = []
    for index, function in enumerate(functions):
        problems += _problems(function, f"{where}.{index}", tokenizer=tokenizer, longest=longest)
    names = labels(functions)
    if len(set(names)) < len(names):
        rule = "names that differ, once those of one name are numbered"
        problems.append(Problem(where, ", ".join(names), rule, "give your functions other names"))
    return problems


def check_fields(
    functions: Sequence[RewardFunction], prompts: Sequence[Prompt], *, where: str = "reward.functions"
) -> list[Problem]:
    """Checks that every prompt has the fields that functions read."""
    problems: list[Problem] = []
    for index, function in enumerate(functions):
        setting, columns = _columns(function)
        for column in columns:
            for problem in missing_column(f"{where}.{index}.{setting}", column, prompts):
                if function.adapter is not None:  # the function's signature names the columns, not the setting
                    problem = replace(problem, field=f"{where}.{index}.name", value=function.name)
                problems.append(problem)
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
    fix = "add the column to the rows of the prompts"
    if known:
        fix = f"name one that it has ({known})"
    if where.endswith(".adapter"):
        fix = f"add the column, or rename one with columns: {{{column}: ...}}"
        if known:
            fix += f" ({known})"
        rule = f"reads the column {column}, {rule}"
    yield Problem(where, column, rule, fix)


def _columns(function: RewardFunction) -> tuple[str, Sequence[str]]:
    """Returns the setting that names the columns that a function reads, and the columns."""
    if function.name in RULES:
        parameter = inspect.signature(RULES[function.name]).parameters.get("field")
        if parameter is not None:
            return "args.field", [function.args.get("field", parameter.default)]
    if function.name == "judge":
        return "args.template", template_columns(function.args["template"])
    if function.adapter is not None:
        return "adapter", required_columns(function, resolve_reward(function.name))
    return "", []


def _problems(function: RewardFunction, where: str, *, tokenizer: bool, longest: int | None) -> Iterator[Problem]:
    try:
        target = resolve_reward(function.name)
    except ValueError as error:
        usual = "name a built-in function, or one that can be imported from the working directory; see docs/rewards.md"
        fix = suggestion(function.name) or usual
        if ":" not in function.name and (near := difflib.get_close_matches(function.name, RULES, n=1)):
            fix = f"did you mean {near[0]}?"
        yield Problem(f"{where}.name", function.name, str(error), fix)
        return
    if labels([function])[0] in _TAKEN:
        rule = f"none of {', '.join(_TAKEN)}, which are names of other metrics"
        yield Problem(f"{where}.name", function.name, rule, "give your function another name")
    try:
        check_signature(function, target)
    except ValueError as error:
        fix = adapter_fix(function, target) or _FIX
        yield Problem(f"{where}.args", shown(dict(function.args)), str(error), fix)
        return
    if function.name == "math_verify" and find_spec("math_verify") is None:
        fix = "pip install -e '.[math]' in MegaRL's directory"
        yield Problem(f"{where}.name", function.name, "needs the package math-verify", fix)
    if function.name in RULES:
        wrong = list(_values(target, function.args, f"{where}.args"))
        yield from wrong or _overlong(function, f"{where}.args", longest)
        if function.name not in TOKEN_RULES and not tokenizer:
            fix = "set model.tokenizer, or choose a function that reads token ids"
            yield Problem(f"{where}.name", function.name, "reads text: needs a tokenizer", fix)


def adapter_fix(function: RewardFunction, target: Function) -> str | None:
    """Returns the fix for a function that has the parameters of another system's."""
    if function.adapter is not None or function.unit != "response":
        return None
    likely = likely_adapter(target)
    return likely and f"set adapter: {likely}, whose parameters the function has"


def _values(function: Function, args: Mapping[str, Any], where: str) -> Iterator[Problem]:
    """Finds arguments that the annotations of a built-in function do not accept."""
    hints = get_type_hints(function, include_extras=True)
    for name, value in args.items():
        try:
            TypeAdapter(hints[name]).validate_python(value, strict=True)
        except ValidationError as error:
            rule = error.errors()[0]["msg"].removeprefix("Value error, ").removeprefix("Input ")
            yield Problem(f"{where}.{name}", shown(value), rule, _FIX)


def _overlong(function: RewardFunction, where: str, longest: int | None) -> Iterator[Problem]:
    """The penalty must start within a response, and be full at its largest length at the latest."""
    if function.name != "soft_overlong":
        return
    most = function.args["max_tokens"]
    rising = function.args["buffer_tokens"]
    if rising > most:
        rule = f"at most max_tokens = {most}: the penalty would start before the response"
        yield Problem(f"{where}.buffer_tokens", str(rising), rule, f"set it to {most} or less")
    if longest is not None and most > longest:
        rule = f"at most rollout.max_new_tokens = {longest}: no response is longer"
        yield Problem(f"{where}.max_tokens", str(most), rule, f"set it to {longest}")


def check_own_functions(config: RunConfig) -> list[Problem]:
    """Imports the user's algorithms and way to move weights, and checks arguments, without calling them.

    Checks nothing without torch, as on a machine that only launches runs.
    """
    if find_spec("torch") is None:
        return []
    problems: list[Problem] = []
    for field, function in _user_functions(config, ""):
        problems += _user_function_problems(config, field, function)
    name = config.resharding.transport if isinstance(config, RolloutTrainingConfig) else ""
    if ":" in name:  # a class of the user
        from megarl.resharding import WeightTransfer

        try:
            resolve_class(name, WeightTransfer)
        except ValueError as error:
            usual = "name one that can be imported from the working directory; see docs/extending.md"
            problems.append(Problem("resharding.transport", name, str(error), suggestion(name) or usual))
    return problems


def _user_functions(section: Section, above: str) -> Iterator[tuple[str, CustomFunction]]:
    """Yields every function of the user in a section, with its field."""
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        field = f"{above}{info.alias or name}"
        if isinstance(value, CustomFunction):
            yield field, value
        elif isinstance(value, Section):
            yield from _user_functions(value, f"{field}.")


def _user_function_problems(config: RunConfig, field: str, named: CustomFunction) -> Iterator[Problem]:
    level = getattr(named, "level", None)
    (kind,) = (kind for kind in KINDS if kind.field == field and kind.level == level)
    try:
        function = resolve(named.name)
    except ValueError as error:
        usual = "name one that can be imported from the working directory; see docs/algorithms.md"
        yield Problem(f"{field}.name", named.name, str(error), suggestion(named.name) or usual)
        return
    arguments = [*kind.arguments]
    for argument, switch in kind.further:
        if attrgetter(switch)(config) is True:
            arguments.append(argument)
    positional = len(arguments)
    keywords = kind.keywords
    calls = "its first arguments are"
    if kind.named:
        positional = 0
        keywords = tuple(kind.reads(named.name))
        calls = "it reads any of"
    try:
        check_options(function, named.args, name=named.name, positional=positional, given=keywords)
    except ValueError as error:
        fix = f"correct them; {calls} ({', '.join(arguments)}); see docs/algorithms.md"
        yield Problem(f"{field}.args", shown(dict(named.args)), str(error), fix)
