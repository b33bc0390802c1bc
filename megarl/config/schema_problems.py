"""What pydantic finds, told in the words of a configuration: field, value, rule, fix."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, get_args

from pydantic import ValidationError

from megarl.config.problems import Problem, shown
from megarl.config.schema import RunConfig
from megarl.config.schema.walk import entries, fields, plain, section

_TYPES = {
    "dict_type": "should be keys with values",
    "model_type": "should be keys with values",
    "string_type": "should be text",
    "tuple_type": "should be a list",
}
"""What pydantic says in Python's words, in those of YAML."""


def schema_problems(error: ValidationError, schema: type[RunConfig]) -> list[Problem]:
    """One problem for each error of a validation of a stage's schema."""
    return [_problem(schema, str(e["type"]), e["loc"], e["msg"], e["input"]) for e in error.errors(include_url=False)]


def _problem(schema: type[RunConfig], kind: str, loc: Sequence[int | str], message: str, value: object) -> Problem:
    path = [str(part) for part in loc if part != "[key]"]
    field, parent = ".".join(path), _field_names(schema, path[:-1])
    if kind == "extra_forbidden":
        return Problem(field=field, value=shown(value), rule="unknown key", fix=_suggestion(path[-1], parent))
    if loc[-1] == "[key]" and kind == "literal_error":
        choices = _key_choices(schema, path[:-1])
        return Problem(
            field=field, value="(key)", rule=f"one of {', '.join(choices)}", fix=_suggestion(path[-1], choices)
        )
    if loc[-1] == "[key]":
        fix = "lower-case letters, digits and underscores, a letter first"
        return Problem(field=field, value="(key)", rule="a name", fix=fix)
    description = _description(schema, path)
    if kind == "missing":
        return Problem(field=field, value="(missing)", rule="required", fix=f"add it: {description}")
    rule = _TYPES.get(kind) or message.removeprefix("Value error, ").removeprefix("Input ")
    return Problem(field=field, value=shown(value), rule=rule, fix=f"correct it: {description}")


def _suggestion(key: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"remove it; known here: {', '.join(known)}"


def _field_names(schema: type[RunConfig], path: Sequence[str]) -> list[str]:
    """The keys that the schema knows under a path, as they are written in YAML."""
    owner = section(_annotation(schema, path))
    return list(fields(owner)) if owner is not None else []


def _description(schema: type[RunConfig], path: Sequence[str]) -> str:
    owner = section(_annotation(schema, path[:-1]))
    known = fields(owner) if owner is not None else {}
    return (known[path[-1]].description if path and path[-1] in known else None) or "see docs/configuration.md"


def _key_choices(schema: type[RunConfig], path: Sequence[str]) -> list[str]:
    return [str(choice) for choice in get_args(get_args(_annotation(schema, path))[0])]


def _annotation(schema: type[RunConfig], path: Sequence[str]) -> Any:
    """The type at a path of the schema; None where the path leaves it."""
    here: Any = schema
    for part in path:
        inside = entries(here)
        if inside is not None:
            here = inside
        else:
            owner = section(here)
            known = fields(owner) if owner is not None else {}
            here = plain(known[part].annotation) if part in known else None
    return here
