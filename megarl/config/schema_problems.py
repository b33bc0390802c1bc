"""What pydantic finds, told in the words of a configuration: field, value, rule, fix."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from megarl.config.problems import Problem, shown
from megarl.config.schema import RunConfig


def schema_problems(error: ValidationError) -> list[Problem]:
    """One problem for each error of a validation of RunConfig."""
    return [_problem(str(e["type"]), e["loc"], e["msg"], e["input"]) for e in error.errors(include_url=False)]


def _problem(kind: str, loc: Sequence[int | str], message: str, value: object) -> Problem:
    path = [str(part) for part in loc if part != "[key]"]
    field, parent = ".".join(path), field_names(path[:-1])
    if kind == "extra_forbidden":
        return Problem(field=field, value=shown(value), rule="unknown key", fix=_suggestion(path[-1], parent))
    if loc[-1] == "[key]" and kind == "literal_error":
        choices = _key_choices(path[:-1])
        return Problem(
            field=field, value="(key)", rule=f"one of {', '.join(choices)}", fix=_suggestion(path[-1], choices)
        )
    if loc[-1] == "[key]":
        fix = "lower-case letters, digits and underscores, a letter first"
        return Problem(field=field, value="(key)", rule="a name", fix=fix)
    description = _description(path)
    if kind == "missing":
        return Problem(field=field, value="(missing)", rule="required", fix=f"add it: {description}")
    rule = message.removeprefix("Value error, ").removeprefix("Input ")
    return Problem(field=field, value=shown(value), rule=rule, fix=f"correct it: {description}")


def _suggestion(key: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"remove it; known here: {', '.join(known)}"


def field_names(path: Sequence[str]) -> list[str]:
    """The keys that the schema knows under a path, as they are written in YAML."""
    model = _annotation(path)
    return list(_fields(model)) if isinstance(model, type) and issubclass(model, BaseModel) else []


def _description(path: Sequence[str]) -> str:
    owner = _annotation(path[:-1])
    fields = _fields(owner) if isinstance(owner, type) and issubclass(owner, BaseModel) else {}
    return (fields[path[-1]].description if path and path[-1] in fields else None) or "see the documentation"


def _key_choices(path: Sequence[str]) -> list[str]:
    mapping = _annotation(path, unwrap_mapping=False)
    return [str(choice) for choice in get_args(get_args(mapping)[0])]


def _fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    return {info.alias or name: info for name, info in model.model_fields.items()}


def _annotation(path: Sequence[str], *, unwrap_mapping: bool = True) -> Any:
    """The type at a path of the schema; None where the path leaves it."""
    here: Any = RunConfig
    for part in path:
        if isinstance(here, type) and issubclass(here, BaseModel):
            fields = _fields(here)
            here = _plain(fields[part].annotation) if part in fields else None
        else:
            here = _plain(get_args(here)[1]) if get_origin(here) is not None else None
    return here


def _plain(annotation: Any) -> Any:
    """Without Annotated and without `| None`."""
    if get_origin(annotation) is None:
        return annotation
    if hasattr(annotation, "__metadata__"):
        return _plain(annotation.__origin__)
    members = [member for member in get_args(annotation) if member is not type(None)]
    return _plain(members[0]) if type(None) in get_args(annotation) and len(members) == 1 else annotation
