"""Walks the schema: the sections and choices of a field's type, and their paths."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Union, cast, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megarl.config.schema.choices import OneOf


def fields(schema: Any) -> dict[str, FieldInfo]:
    """Returns the fields of a section by their keys in YAML; of other types, none."""
    if isinstance(schema, type) and issubclass(schema, BaseModel):
        return {info.alias or name: info for name, info in schema.model_fields.items()}
    return {}


def type_of(info: FieldInfo) -> Any:
    """Returns the plain type of a field."""
    return plain(info.rebuild_annotation())


def plain(annotation: Any) -> Any:
    """Returns a type without Annotated and without ``| None``; for choices, their ``OneOf``."""
    if hasattr(annotation, "__metadata__"):
        for part in annotation.__metadata__:
            if isinstance(part, OneOf):
                return part
        return plain(annotation.__origin__)
    if get_origin(annotation) in (Union, types.UnionType):
        members = [member for member in get_args(annotation) if member is not types.NoneType]
        if len(members) == 1:
            return plain(members[0])
    return annotation


def entries(annotation: Any) -> Any:
    """Returns the type of the entries of a mapping or a list; None for other types."""
    inner = plain(annotation)
    if get_origin(inner) is Mapping:
        return plain(get_args(inner)[1])
    if get_origin(inner) is tuple and get_args(inner)[1:] == (Ellipsis,):
        return plain(get_args(inner)[0])
    return None


def section(annotation: Any) -> type[BaseModel] | None:
    """Returns the section of a field, or of the entries of a mapping or a list; None for plain values."""
    inner = entries(annotation) or plain(annotation)
    if isinstance(inner, type) and issubclass(inner, BaseModel):
        return inner
    return None


def choices(annotation: Any) -> Mapping[str, type[BaseModel]]:
    """Returns the choices of a field by name; empty without any."""
    inner = plain(annotation)
    if isinstance(inner, OneOf):
        return inner.table
    return {}


def within(annotation: Any, part: object) -> Any:
    """Returns the type of a section's field, of an entry of a mapping or a list, or of a choice; None without one."""
    table = choices(annotation)
    if table:
        return table.get(str(part))
    inside = entries(annotation)
    if inside is not None:
        return inside
    info = fields(plain(annotation)).get(str(part))
    return None if info is None else type_of(info)


def has_path(schema: Any, path: str) -> bool:
    """Whether a schema has a field or an option; ``<name>`` stands for an entry of a mapping or a list."""
    here: Any = schema
    for part in path.split("."):
        found = [within(owner, part) for owner in choices(here).values() or (here,)]
        here = next((inner for inner in found if inner is not None), None)
    return here is not None


def values_by_path(value: object, above: str = "") -> Iterator[tuple[str, object]]:
    """Yields the entries of a mapping, and of sections, mappings and lists in it, with their paths in YAML."""
    inner: Mapping[Any, object] = {}
    if isinstance(value, BaseModel):
        inner = dict(zip(fields(type(value)), dict(value).values(), strict=True))
    elif isinstance(value, Mapping):
        inner = cast(Mapping[Any, object], value)
    elif isinstance(value, tuple | list):
        inner = dict(enumerate(cast(Sequence[object], value)))
    for key, entry in inner.items():
        yield f"{above}{key}", entry
        yield from values_by_path(entry, f"{above}{key}.")


def keys(schema: type[BaseModel], loc: Sequence[int | str]) -> tuple[list[int | str], Any]:
    """Returns the path of a validation error in the configuration, and the type there.

    Pydantic's locations also have the name of a choice, between the key of its field
    and that of an option.
    """
    path: list[int | str] = []
    here: Any = schema
    for part in loc:
        if not choices(here) and part != "[key]":
            path.append(part)
        here = within(here, part)
    return path, here


def sections(schema: type[BaseModel], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every section and every ``OneOf`` below a schema with its path, outer ones first.

    ``<name>`` and ``<n>`` stand for the entries of mappings and lists.
    """
    for key, info in fields(schema).items():
        inner = type_of(info)
        below = section(inner)
        if choices(inner):
            yield above + key, inner
        elif below is not None:
            entry = {Mapping: ".<name>", tuple: ".<n>"}.get(get_origin(inner), "")
            path = above + key + entry
            yield path, below
            yield from sections(below, f"{path}.")
