"""The way through the schema: which sections a field's type holds, and how a path is written."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo


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


def sections(schema: type[BaseModel], above: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Every section below a schema with its path, outer ones first; the entries of mappings and lists stand for all."""
    for key, info in fields(schema).items():
        below = section(info.annotation)
        if below is not None:
            kind = get_origin(plain(info.annotation))
            path = above + key + {Mapping: ".<name>", tuple: ".<n>"}.get(kind, "")
            yield path, below
            yield from sections(below, f"{path}.")
