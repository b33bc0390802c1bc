"""Problems (field, value, rule, fix) from the errors of pydantic."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from megarl.config.foreign_keys import foreign_fix
from megarl.config.problems import KEY, Problem, did_you_mean, shown
from megarl.config.schema.choices import SHORTHAND, Choice, CustomFunction
from megarl.config.schema.schema_walk import choices, fields, keys, section, sections, type_of
from megarl.plugins import suggestion

_TYPES = {
    "dict_type": "should be keys with values",
    "model_type": "should be keys with values",
    "string_type": "should be text",
    "tuple_type": "should be a list",
}
"""Rules in the words of YAML; the others are pydantic's."""
_BOUNDS = {
    "greater_than": "raise it above {}",
    "greater_than_equal": "raise it to {} or more",
    "less_than": "lower it below {}",
    "less_than_equal": "lower it to {} or less",
}
_CORRECTIONS = {
    **dict.fromkeys(("int_type", "int_from_float"), "write a whole number"),
    "float_type": "write a number",
    "bool_type": "write true or false",
    "string_type": "write text, in quotes where it looks like something else",
    "tuple_type": "write a list: [...]",
    **dict.fromkeys(("dict_type", "model_type"), "write keys with values: {key: value}"),
}


def schema_problems(error: ValidationError, schema: type[BaseModel]) -> list[Problem]:
    """Returns a problem for each error of a validation."""
    return [_problem(schema, e) for e in error.errors(include_url=False)]


def _problem(schema: type[BaseModel], error: ErrorDetails) -> Problem:
    kind = error["type"]
    loc = error["loc"]
    value = error["input"]
    path, here = keys(schema, loc)
    field = ".".join(map(str, path))
    if loc[-1] == "[key]":
        return _bad_key(field, str(path[-1]), error, keys(schema, loc[:-2])[1])
    if kind == "extra_forbidden":
        return _unknown(schema, loc, field, value)
    description = _description(schema, loc)
    if kind.startswith("union_tag"):
        return _no_choice(field, value, choices(here), description)
    if kind == "missing":
        return Problem(field, "(missing)", "required", f"add it: {description}")
    fix = f"{_correction(kind, error.get('ctx', {}), value)}; it is: {description}"
    if isinstance(value, str) and "name" in fields(here):
        fix = f"write it as {{name: {value}}}"
    return Problem(field, shown(value), _TYPES.get(kind) or _rule(error), fix)


def _rule(error: ErrorDetails) -> str:
    return error["msg"].removeprefix("Value error, ").removeprefix("Input ")


def _correction(kind: str, limits: Mapping[str, Any], value: object) -> str:
    if kind == "literal_error":
        known = re.findall(r"'([^']+)'", limits["expected"])
        return did_you_mean(str(value), known) or "choose one of them"
    if kind in _BOUNDS:
        (limit,) = limits.values()
        if isinstance(limit, float):
            limit = f"{limit:g}"
        return _BOUNDS[kind].format(limit)
    return _CORRECTIONS.get(kind, "correct it")


def _description(schema: type[BaseModel], loc: Sequence[int | str]) -> str:
    """Returns the description of a field; of an entry of a list or a mapping, that of the list or mapping."""
    for end in range(len(loc) - 1, -1, -1):
        _, owner = keys(schema, loc[:end])
        info = fields(owner).get(str(loc[end]))
        if info is not None and info.description:
            return " ".join(info.description.split())
    return "see docs/configuration.md"


def _bad_key(field: str, key: str, error: ErrorDetails, mapping: Any) -> Problem:
    """Returns the problem of a key of a mapping that is not allowed."""
    if error["type"] == "value_error":
        return Problem(field, KEY, _rule(error), "rename or remove it")
    if error["type"] == "literal_error":
        known = [str(choice) for choice in get_args(get_args(mapping)[0])]
        return Problem(field, KEY, f"one of {', '.join(known)}", _suggestion(field, key, known))
    return Problem(field, KEY, "a name", "lower-case letters, digits and underscores, a letter first")


def _unknown(schema: type[BaseModel], loc: Sequence[int | str], field: str, value: object) -> Problem:
    """Returns the problem of a key that the section or the choice does not have."""
    key = str(loc[-1])
    (_, owner) = keys(schema, loc[:-1])
    (_, above) = keys(schema, loc[:-2])
    if key == SHORTHAND:
        rule = f"should be keys with values, and is both keys and the text {value}"
        return Problem(field.removesuffix("."), shown(value), rule, "remove one of them")
    known = list(fields(owner))
    if issubclass(owner, Choice):
        known.remove("name")
    fix = foreign_fix(schema, field, value, sure=False) or _suggestion(field, key, known)
    if not issubclass(owner, Choice):
        elsewhere = [f"{field.removesuffix(key)}{path}" for path in _deeper(owner, key, value)][:3]
        if elsewhere:
            fix = f"did you mean {' or '.join(elsewhere)}?"
        if owner is schema or not elsewhere:
            fix = foreign_fix(schema, field, value, sure=True) or fix
        return Problem(field, shown(value), "unknown key", fix)
    others = [name for name, choice in choices(above).items() if key in fields(choice)]
    if others:
        having = "which has it" if len(others) == 1 else "which have it"
        fix = f"remove it, or choose {' or '.join(others)}, {having}"
    options = f"its options are {', '.join(known)}" if known else "it has none"
    return Problem(field, shown(value), f"unknown option of {loc[-2]}; {options}", fix)


def _deeper(owner: type[BaseModel], key: str, value: object) -> Iterator[str]:
    """Yields the paths below a section at which there is a field or an option of that name, for such a value."""
    for path, below in sections(owner):
        if "<" in path:
            continue
        for schema in choices(below).values() or (below,):
            if key not in fields(schema):
                continue
            kind = type_of(fields(schema)[key])
            may_hold_keys = bool(choices(kind)) or section(kind) is not None
            if may_hold_keys or not isinstance(value, Mapping):
                yield f"{path}.{key}"
                break


def _no_choice(field: str, value: object, table: Mapping[str, type[BaseModel]], description: str) -> Problem:
    """Returns the problem of a choice without a name, or with one that the table does not have."""
    name = None
    if isinstance(value, Mapping):
        name = cast(Mapping[object, object], value).get("name")
    rule = f"one of {', '.join(table)}"
    if name is None:
        fix = "give a name, or a name and its options: {name: ..., option: ...}"
        return Problem(field, shown(cast(object, value)), rule, fix)
    fix = did_you_mean(str(name).lower(), list(table), cutoff=0.5)
    if not fix and any(issubclass(choice, CustomFunction) for choice in table.values()):
        fix = suggestion(str(name))
    return Problem(field, shown(name), rule, fix or f"choose one of them; it is: {description}")


def _suggestion(field: str, key: str, known: Sequence[str]) -> str:
    listed = f"remove it; known here: {', '.join(known)}" if known else "remove it"
    return did_you_mean(key, known, above=field.removesuffix(key)) or listed
