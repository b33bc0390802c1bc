"""The page that lists every field, made from the schema; this module as a script prints it."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megarl.config.schema import RunConfig

_INTRODUCTION = """\
# Configuration

A run is described by a YAML file. `defaults:` lists files that it inherits, relative to it; later ones win over
earlier ones, and the file itself over all. `key.path=value` on the command line wins over the files. `null` removes an
inherited group or role. `${key.path}` refers to another field. Unknown keys are errors, and every problem is reported
at once; `megarl plan CONFIG` checks without running.

This page is made from the schema by `make docs`.
"""


def markdown() -> str:
    """The whole page."""
    parts = [_INTRODUCTION]
    for path, schema in _sections("", RunConfig):
        rows = "\n".join(_row(name, info) for name, info in _leaves(schema))
        if rows:
            heading = f"## `{path}`\n\n{(schema.__doc__ or '').strip()}\n"
            parts.append(f"{heading}\n| field | type | default | meaning |\n| --- | --- | --- | --- |\n{rows}\n")
    return "\n".join(parts)


def _sections(path: str, schema: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    yield path, schema
    for name, info in schema.model_fields.items():
        below = _section(info.annotation)
        if below is not None:
            step = f"{info.alias or name}.<name>" if _is_mapping(info.annotation) else info.alias or name
            yield from _sections(f"{path}.{step}".lstrip("."), below)


def _leaves(schema: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    for name, info in schema.model_fields.items():
        if _section(info.annotation) is None:
            yield info.alias or name, info


def _section(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, or a mapping of them; None for a plain value."""
    candidates = [annotation, *get_args(annotation)]
    return next((part for part in candidates if isinstance(part, type) and issubclass(part, BaseModel)), None)


def _is_mapping(annotation: Any) -> bool:
    return get_origin(annotation) is Mapping


def _row(name: str, info: FieldInfo) -> str:
    default = "required" if info.is_required() else f"`{_yaml(info.default)}`"
    return f"| `{name}` | {_type(info.annotation)} | {default} | {info.description} |"


def _yaml(value: object) -> str:
    if isinstance(value, str):
        return value
    return "null" if value is None else json.dumps(value)


def _type(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Literal:
        return " or ".join(f"`{choice}`" for choice in get_args(annotation))
    if origin in (Union, types.UnionType):
        return " or ".join(_type(part) for part in get_args(annotation))
    if hasattr(annotation, "__metadata__"):
        return _type(annotation.__origin__)
    if origin is tuple:
        return f"list of {len(get_args(annotation))}"
    if origin is Mapping:
        return "mapping"
    names: dict[object, str] = {str: "text", type(None): "null"}
    return names.get(annotation, str(annotation.__name__))


if __name__ == "__main__":
    print(markdown(), end="")
