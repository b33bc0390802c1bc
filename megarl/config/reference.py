"""The page that lists every field, made from the schema; this module as a script prints it."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megarl.config.schema import STAGES, RunConfig
from megarl.config.schema.walk import entries, fields, plain, section, sections

_INTRODUCTION = """\
# Configuration

A run is described by a YAML file. `defaults:` lists files that it inherits, relative to it; later ones win over
earlier ones, and the file itself over all. `key.path=value` on the command line wins over the files. `null` removes an
inherited group or role. `${key.path}` refers to another field. Paths of models, data and runs are relative to the
directory that `megarl` is run in. Unknown keys are errors, and every problem is reported at once; `megarl plan CONFIG`
checks without running.

The stages come first, with their sections; then every section, once. This page is made from the schema by `make docs`.
"""
_HEADER = "| field | type | default | meaning |\n| --- | --- | --- | --- |\n"


def markdown() -> str:
    """The whole page."""
    common = fields(RunConfig)
    parts = [_INTRODUCTION, _table("All stages", RunConfig, common)]
    for stage, schema in STAGES.items():
        own = {key: info for key, info in fields(schema).items() if key not in common}
        parts.append(_table(f"Stage `{stage}`", schema, own))
    for schema, places in _places().items():
        heading = ", ".join(f"`{path}`" for path in places)
        stages = {stage for found in places.values() for stage in found}
        if len(stages) < len(STAGES):
            heading += f" ({', '.join(stage for stage in STAGES if stage in stages)})"
        parts.append(_table(heading, schema, fields(schema)))
    return "\n".join(parts)


def _places() -> dict[type[BaseModel], dict[str, list[str]]]:
    """Every section with the paths that it stands at, and their stages."""
    found: dict[type[BaseModel], dict[str, list[str]]] = {}
    for stage, schema in STAGES.items():
        for path, below in sections(schema):
            found.setdefault(below, {}).setdefault(path, []).append(stage)
    return found


def _table(heading: str, schema: type[BaseModel], rows: Mapping[str, FieldInfo]) -> str:
    text = "\n".join(_row(key, info) for key, info in rows.items())
    return f"## {heading}\n\n{_summary(schema)}\n\n{_HEADER}{text}\n"


def _summary(schema: type[BaseModel]) -> str:
    return (schema.__doc__ or "").strip()


def _row(key: str, info: FieldInfo) -> str:
    default = "required" if info.is_required() else _default(info.default)
    meaning = " ".join((info.description or "").split())
    return f"| `{key}` | {_type(info.annotation)} | {default} | {meaning} |"


def _default(value: object) -> str:
    if isinstance(value, BaseModel):
        return "its own"
    if isinstance(value, str):
        return f"`{value}`"
    return "`null`" if value is None else f"`{json.dumps(value)}`"


def _type(annotation: Any) -> str:
    return " or ".join(_alternatives(annotation))


def _alternatives(annotation: Any) -> Iterator[str]:
    if hasattr(annotation, "__metadata__"):
        yield from _alternatives(annotation.__origin__)
    elif get_origin(annotation) is Literal:
        yield from (f"`{choice}`" for choice in get_args(annotation))
    elif get_origin(annotation) in (Union, types.UnionType):
        for part in get_args(annotation):
            yield from _alternatives(part)
    else:
        yield _noun(annotation, get_args(annotation))


def _noun(annotation: Any, parts: Sequence[Any]) -> str:
    if entries(annotation) is not None and section(annotation) is not None:
        return "sections by name" if get_origin(annotation) is Mapping else "list of sections"
    if section(annotation) is not None:
        return "section"
    if get_origin(annotation) is tuple:
        return f"list of {_type(plain(parts[0])) if parts[-1] is Ellipsis else len(parts)}"
    if get_origin(annotation) is Mapping:
        return "mapping"
    names: dict[object, str] = {str: "text", type(None): "null"}
    return names.get(annotation, str(annotation.__name__))


if __name__ == "__main__":
    print(markdown(), end="")
