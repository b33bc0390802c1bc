"""The page of all fields, from the schema; this module as a script prints it."""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megarl.config.inheritance import SHORT_STAGES
from megarl.config.schema import STAGES, RowSettings, RunConfig, TrainingConfig, stage_classes
from megarl.config.schema.choices import names_of
from megarl.config.schema.schema_walk import choices, entries, fields, plain, section, sections

INTRODUCTION = Path(__file__).with_name("configuration.md")
_HEADER = "| field | type | default | meaning |\n| --- | --- | --- | --- |\n"
_CHOICES_HEADER = "| name | option | type | default | meaning |\n| --- | --- | --- | --- | --- |\n"


def markdown() -> str:
    """Returns the whole page."""
    parts = [
        INTRODUCTION.read_text(encoding="utf-8").replace("{short}", "`, `".join(SHORT_STAGES)),
        _contents(),
        _table("All stages", RunConfig, fields(RunConfig)),
        _table("Stages that train", TrainingConfig, _own(TrainingConfig, RunConfig)),
    ]
    for stage, schema in stage_classes().items():
        base = TrainingConfig if issubclass(schema, TrainingConfig) else RunConfig
        parts.append(_table(f"Stage `{stage}`", schema, _own(schema, base)))
    for below, places in _places().items():
        heading = _heading(places)
        table = choices(below)
        if table:
            parts.append(_choices(heading, table))
        else:
            last = RowSettings.model_fields
            rows = sorted(fields(below).items(), key=lambda row: row[0] in last)
            parts.append(_table(heading, below, dict(rows)))
    return "\n".join(parts)


def _contents() -> str:
    """Returns links to the sections of each stage, by path."""
    rows = ["| stage | its sections |", "| --- | --- |"]
    for stage in STAGES:
        links: dict[str, str] = {}
        for places in _places().values():
            for path, stages in places.items():
                if stage in stages:
                    links[path] = _link(f"`{path}`", _heading(places))
        listed = ", ".join(links[path] for path in sorted(links))
        rows.append(f"| {_link(f'`{stage}`', f'Stage `{stage}`')} | {listed} |")
    both = f"{_link('all stages', 'All stages')}, and of {_link('those that train', 'Stages that train')}"
    return "\n".join(["## Contents", "", f"Fields of {both}.", "", *rows]) + "\n"


def _link(text: str, heading: str) -> str:
    """Returns a link to a heading, by GitHub's anchor."""
    anchor = re.sub(r"[^a-z0-9_ -]", "", heading.lower()).replace(" ", "-")
    return f"[{text}](#{anchor})"


def _heading(places: Mapping[str, Sequence[str]]) -> str:
    """Returns all paths of a section, and its stages unless all have it."""
    paths = ", ".join(f"`{path}`" for path in places)
    having = set[str]().union(*places.values())
    stages = [stage for stage in STAGES if stage in having]
    return paths if len(stages) == len(STAGES) else f"{paths} ({', '.join(stages)})"


def _own(schema: type[BaseModel], base: type[BaseModel]) -> dict[str, FieldInfo]:
    """Returns the fields that a schema adds to another, or changes."""
    rows = {_row(key, info) for key, info in fields(base).items()}
    return {key: info for key, info in fields(schema).items() if _row(key, info) not in rows}


def _places() -> dict[Any, dict[str, list[str]]]:
    """Returns the paths of every section and table of choices, with their stages."""
    found: dict[Any, dict[str, list[str]]] = {}
    for stage, schema in stage_classes().items():
        for path, below in sections(schema):
            found.setdefault(below, {}).setdefault(path, []).append(stage)
    return found


def _table(heading: str, schema: type[BaseModel], rows: Mapping[str, FieldInfo]) -> str:
    text = "\n".join(_row(key, info) for key, info in rows.items())
    return f"## {heading}\n\n{_summary(schema)}\n\n{_HEADER}{text}\n"


def _choices(heading: str, table: Mapping[str, type[BaseModel]]) -> str:
    """Returns a table with a row per name, and one per option below it."""
    rows: list[str] = []
    for choice in dict.fromkeys(table.values()):
        names = ", ".join(f"`{name}`" for name in names_of(choice))
        rows.append(f"| {names} | | | | {' '.join(_summary(choice).split())} |")
        rows += [f"| {_row(key, info)}" for key, info in fields(choice).items() if key != "name"]
    return f"## {heading}\n\nOne of these, by name.\n\n{_CHOICES_HEADER}" + "\n".join(rows) + "\n"


def _summary(schema: type[BaseModel]) -> str:
    return inspect.cleandoc(schema.__doc__ or "")


def _row(key: str, info: FieldInfo) -> str:
    default = "required" if info.is_required() else _default(info.default)
    meaning = " ".join((info.description or "").split())
    return f"| `{key}` | {_type(info.rebuild_annotation())} | {default} | {meaning} |"


def _default(value: object) -> str:
    if isinstance(value, BaseModel):
        name = getattr(value, "name", None)
        return "its own" if name is None else f"`{name}`"
    if isinstance(value, str):
        return f"`{value}`"
    return f"`{json.dumps(value)}`"


def _type(annotation: Any) -> str:
    return " or ".join(_alternatives(annotation))


def _alternatives(annotation: Any) -> Iterator[str]:
    if hasattr(annotation, "__metadata__"):
        if choices(annotation):
            yield "choice"
        else:
            yield from _alternatives(annotation.__origin__)
    elif get_origin(annotation) is Literal:
        for choice in get_args(annotation):
            yield f"`{choice}`"
    elif get_origin(annotation) in (Union, types.UnionType):
        for part in get_args(annotation):
            yield from _alternatives(part)
    else:
        yield _noun(annotation, get_args(annotation))


def _noun(annotation: Any, parts: Sequence[Any]) -> str:
    origin = get_origin(annotation)
    if section(annotation) is not None:
        if entries(annotation) is None:
            return "section"
        return "sections by name" if origin is Mapping else "list of sections"
    if origin is tuple:
        if parts[-1] is Ellipsis:
            return f"list of {_type(plain(parts[0]))}"
        return f"list of {len(parts)}"
    if origin is Mapping:
        return "mapping"
    names: dict[object, str] = {str: "text", type(None): "null"}
    return names.get(annotation, str(annotation.__name__))


if __name__ == "__main__":
    print(markdown(), end="")
