"""Keys of other systems: what an unknown key is here."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml
from pydantic import BaseModel

from megarl.config.schema.schema_walk import has_path, values_by_path

SYSTEMS: Final = {"trl": "TRL", "verl": "verl", "nemo_rl": "NeMo-RL"}
_PAGE = "docs/from-trl-verl.md"
_ALTERNATIVES = 2
"""Rows that a key may stand for; the end of a key that more have says nothing."""
_SHOWN = 6
"""Keys of a section of another system that a problem names."""


@dataclass(frozen=True, kw_only=True)
class ForeignKey:
    """Keys of other systems with one meaning; see foreign_keys.yaml.

    Args:
        keys: keys by system.
    """

    ours: tuple[str, ...]
    remark: str
    keys: Mapping[str, tuple[str, ...]]

    def fix(self, schema: type[BaseModel]) -> str:
        """Returns what to do with such a key in a configuration of this schema."""
        here = [path for path in self.ours if has_path(schema, path)] or list(self.ours)
        if not here:
            return f"remove it: {self.remark or 'there is nothing like it yet'}"
        remark = f" ({self.remark})" if self.remark else ""
        return f"use {' or '.join(here)}{remark}"


@functools.cache
def foreign_keys() -> Mapping[str, tuple[ForeignKey, ...]]:
    """Returns the table, by the titles of its parts."""
    parts = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {title: tuple(map(_foreign_key, rows)) for title, rows in parts.items()}


def _foreign_key(row: Mapping[str, str]) -> ForeignKey:
    keys = {system: tuple(row[system].split()) for system in SYSTEMS if system in row}
    return ForeignKey(ours=tuple(row["ours"].split()), remark=row.get("remark", ""), keys=keys)


def foreign_fix(schema: type[BaseModel], path: str, value: object, *, sure: bool) -> str | None:
    """Returns the fix for an unknown key that is another system's, or a section of such keys; else None.

    Args:
        sure: whether the key must be a whole key of another system, or end like one
            in two parts or more.
    """
    found = _find(path, sure=sure)
    if found:
        return "; or ".join(dict.fromkeys(row.fix(schema) for row in found))
    values = dict(values_by_path({path: value}))
    lists = tuple(f"{key}." for key, entry in values.items() if isinstance(entry, list))
    leaves = [key for key, entry in values.items() if not isinstance(entry, Mapping)]
    outside = [key for key in leaves if not key.startswith(lists)]
    inner = {key: rows for key in outside if (rows := _find(key, sure=True))}
    if not inner:
        return None
    named = [f"{key}: {rows[0].fix(schema)}" for key, rows in list(inner.items())[:_SHOWN]]
    return "; ".join([*named, f"see {_PAGE}"])


def _find(path: str, *, sure: bool) -> list[ForeignKey]:
    """Returns the rows with a key that ends like a path, by the longest common end, whole keys first."""
    parts = path.split(".")
    found = dict[tuple[int, bool], list[ForeignKey]]()
    for row in itertools.chain.from_iterable(foreign_keys().values()):
        ends = [_common_end(parts, key.split(".")) for key in itertools.chain.from_iterable(row.keys.values())]
        found.setdefault(max(ends), []).append(row)
    best = max(found)
    end, whole = best
    if end == 0 or len(found[best]) > _ALTERNATIVES:
        return []
    if sure and end == 1 and not whole:
        return []
    return found[best]


def _common_end(path: list[str], key: list[str]) -> tuple[int, bool]:
    """Returns how many of the last parts are equal, and whether these are the whole key."""
    count = 0
    for part, theirs in zip(reversed(path), reversed(key), strict=False):
        if part != theirs:
            break
        count += 1
    return count, count == len(key)
