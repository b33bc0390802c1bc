"""The way through the schema: which sections a field's type holds, and how a path is written."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megarl.config.schema.choices import Choice, table_of


def fields(schema: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields of a section by the keys that YAML has."""
    return {info.alias or name: info for name, info in schema.model_fields.items()}


def plain(annotation: Any) -> Any:
    """A type without Annotated and without ``| None``."""
    if hasattr(annotation, "__metadata__"):
        return plain(annotation.__origin__)
    if get_origin(annotation) in (Union, types.UnionType):
        members = [member for member in get_args(annotation) if member is not type(None)]
        return plain(members[0]) if len(members) == 1 else annotation
    return annotation


def entries(annotation: Any) -> Any:
    """The type of the entries of a mapping or a list; None where the type is neither."""
    inner = plain(annotation)
    if get_origin(inner) is Mapping:
        return plain(get_args(inner)[1])
    if get_origin(inner) is tuple and get_args(inner)[1:] == (Ellipsis,):
        return plain(get_args(inner)[0])
    return None


def section(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, by itself or as entries of a mapping or a list; None for plain values."""
    inner = entries(annotation) or plain(annotation)
    return inner if isinstance(inner, type) and issubclass(inner, BaseModel) else None


def choices(annotation: Any) -> dict[str, type[BaseModel]]:
    """The choices that a field has, by name; empty where it is no table of them."""
    members = get_args(plain(annotation))
    return table_of(members) if members and all(_is_choice(member) for member in members) else {}


def within(annotation: Any, part: object) -> Any:
    """The type below a type: of a section's field, of an entry of a mapping or a list, or a choice; None if none is."""
    table = choices(annotation)
    if table:
        return table.get(str(part))
    inside = entries(annotation)
    if inside is not None:
        return inside
    owner = section(annotation)
    known = fields(owner) if owner is not None else {}
    return plain(known[str(part)].annotation) if str(part) in known else None


def keys(schema: type[BaseModel], loc: Sequence[int | str]) -> tuple[list[int | str], Any]:
    """Where an error of a validation is, as keys of the configuration, and the type there.

    Pydantic's locations name the choice between the key of a table and that of an option.
    """
    path: list[int | str] = []
    here: Any = schema
    for part in loc:
        if not choices(here) and part != "[key]":
            path.append(part)
        here = within(here, part)
    return path, here


def sections(schema: type[BaseModel], above: str = "") -> Iterator[tuple[str, Any]]:
    """Every section and table of choices below a schema with its path, outer ones first.

    The entries of mappings and lists stand for all; what is of a table is its type.
    """
    for key, info in fields(schema).items():
        below, table = section(info.annotation), choices(info.annotation)
        if table:
            yield above + key, plain(info.annotation)
        elif below is not None:
            kind = get_origin(plain(info.annotation))
            path = above + key + {Mapping: ".<name>", tuple: ".<n>"}.get(kind, "")
            yield path, below
            yield from sections(below, f"{path}.")


def _is_choice(member: Any) -> bool:
    return isinstance(member, type) and issubclass(member, Choice)
