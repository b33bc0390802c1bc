"""Rules between fields.

A rule is a public function of these modules, or of a stage's ``config.py``, that yields what is
broken. It takes sections by name, and ``stage``, and holds in the stages whose sections have the
annotated types, and where none is None; an optional one may be, and is None elsewhere. The rules
of ``SECTION_RULES`` hold for every section of a type, and take its path.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from types import NoneType
from typing import Any, Final, get_args, get_type_hints

from pydantic.fields import FieldInfo

from megarl.config.problems import WITHOUT_EFFECT, Broken, Problem, shown
from megarl.config.rules import (
    algorithm_rules,
    data_rules,
    model_rules,
    placement_rules,
    rollout_rules,
    scoring_rules,
    tables,
    training_rules,
)
from megarl.config.schema import (
    Critic,
    Group,
    Model,
    Optimizer,
    Reference,
    Reject,
    Reward,
    RewardFunction,
    SamplingConfig,
    Section,
    SourceFields,
    stage_class,
    trains,
    trains_on_rollouts,
)
from megarl.config.schema.schema_walk import section, type_of, values_by_path
from megarl.types import RoleName

_MODULES = (placement_rules, model_rules, data_rules, rollout_rules, scoring_rules, algorithm_rules, training_rules)

Rule = Callable[..., Iterator[Broken]]
SECTION_RULES: Final[Mapping[type[Section], Rule]] = {
    **dict.fromkeys((Critic, Model, Reference, Reward), model_rules.checkpoints_are_readable),
    Group: placement_rules.groups_have_roles,
    Optimizer: training_rules.rates_fall,
    Reject: algorithm_rules.bounds_are_in_order,
    RewardFunction: scoring_rules.functions_have_their_calls,
    SourceFields: data_rules.sources_exist,
}


def broken_rules(stage: str, sections: Mapping[str, Any]) -> list[Problem]:
    """Returns the problems that the stage's rules find; rules that read invalid sections are left out.

    Of several reasons for which a setting has no effect, the first one is reported.
    """
    known = stage_class(stage).model_fields
    values: dict[str, Any] = {**dict(values_by_path(sections)), **_facts(stage, sections)}
    broken: list[Broken] = []
    for rule, reads in rules_of(stage).items():
        invalid = (known.keys() & reads.keys()) - sections.keys()
        arguments = {name: sections.get(name) for name in reads}
        missing = any(arguments[name] is None and not optional for name, optional in reads.items())
        if not invalid and not missing:
            broken += rule(**arguments)
    for path, value in values.items():
        section_rule = SECTION_RULES.get(value.__class__)
        if section_rule is not None:
            broken += section_rule(path, value)
    problems: list[Problem] = []
    unused = set[str]()
    for found in (*broken, *tables.broken_tables(values)):
        problem = found
        if not isinstance(problem, Problem):
            field, rule, fix = problem
            problem = Problem(field, shown(values[field]), rule, fix)
        if problem.rule.startswith(WITHOUT_EFFECT):
            if problem.field in unused:
                continue
            unused.add(problem.field)
        problems.append(problem)
    return list(dict.fromkeys(problems))


def _facts(stage: str, sections: Mapping[str, Any]) -> dict[str, bool]:
    """Returns what is so besides the values of fields, for the tables."""
    facts = {
        tables.TRAINING: trains(stage),
        tables.ROLLOUT_TRAINING: trains_on_rollouts(stage),
        tables.SCORED_ROLLOUTS: issubclass(stage_class(stage), SamplingConfig),
    }
    if "groups" in sections:
        for role in get_args(RoleName):
            facts[f"the role {role}"] = placement_rules.placed(sections["groups"], role)
    if "algo" in sections:
        facts[tables.TOKEN_REWARDS] = sections["algo"].from_token_rewards
    return facts


@functools.cache
def rules_of(stage: str) -> dict[Rule, dict[str, bool]]:
    """Returns the rules that hold in a stage, and the sections that each reads: True if one may be None."""
    schema = stage_class(stage)
    rules: dict[Rule, dict[str, bool]] = {}
    for module in (*_MODULES, import_module(schema.__module__)):
        for function in vars(module).values():
            if not inspect.isfunction(function) or function.__name__.startswith("_"):
                continue
            if function.__module__ != module.__name__:
                continue
            types = get_type_hints(function)
            if types.pop("return", None) != Iterator[Broken]:
                continue
            if all(_accepts(types[name], schema.model_fields.get(name)) for name in types):
                rules[function] = {name: NoneType in get_args(kind) for name, kind in types.items()}
    return rules


def _accepts(annotation: Any, field: FieldInfo | None) -> bool:
    """Whether a rule's parameter takes the sections of a stage, or None if the stage has none."""
    kinds = get_args(annotation) or (annotation,)
    if field is None:
        return NoneType in kinds
    return issubclass(section(type_of(field)) or str, kinds)
