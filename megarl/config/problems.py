"""The problems of a configuration, which are collected first and reported all at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import yaml
from pydantic import BaseModel

_LONGEST_VALUE = 80
KEY = "(key)"
"""The value of a problem that is in the name of a key, which the field ends with."""


@dataclass(frozen=True)
class Problem:
    """One thing to correct.

    Args:
        field: dotted path, as it is written on the command line.
        value: what was given, as text.
        rule: what must hold.
        fix: what to change.
    """

    field: str
    value: str
    rule: str
    fix: str

    def __str__(self) -> str:
        return f"  {self.field} = {self.value}\n    rule: {self.rule}\n    fix:  {self.fix}"


class ConfigError(ValueError):
    """A configuration that cannot be run; its text lists every problem.

    Args:
        problems: at least one.
        source: the file that was loaded, for the heading.
        unchecked: what was not checked because of them, as the beginning of a sentence; empty for nothing.
    """

    def __init__(self, problems: Sequence[Problem], source: str = "configuration", unchecked: str = "") -> None:
        self.problems, self.unchecked = tuple(problems), unchecked
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        later = [f"{unchecked} are checked once the above is mended."] if unchecked else []
        super().__init__("\n".join([f"{source}: {count}", *map(str, problems), *later]))


def ineffective_settings(
    field: str, section: BaseModel, names: Sequence[str], where: str, otherwise: str
) -> Iterator[Problem]:
    """A problem for each of the named fields of a section that is not at its default, though it has no effect.

    Args:
        field: path of the section.
        where: why, after "has no effect".
        otherwise: an alternative to removing them.
    """
    for name in names:
        info = type(section).model_fields[name]
        value: object = getattr(section, name)
        if value != info.default:
            text: object = getattr(value, "name", "given") if isinstance(value, BaseModel) else value
            key, rule = f"{field}.{info.alias or name}", f"has no effect {where}"
            yield Problem(key, shown(text), rule, f"remove it, {otherwise}")


def correct_path(path: str) -> str:
    """What to do about a path that leads nowhere, and where a relative one was looked up."""
    return "correct the path" if Path(path).is_absolute() else f"correct the path (it is looked up in {Path.cwd()})"


def shown(value: object) -> str:
    """A value as text, short enough for a line."""
    if isinstance(value, Mapping):
        text = yaml.safe_dump(value, default_flow_style=True, width=math.inf).strip()
    else:
        plain = list(cast(tuple[object, ...], value)) if isinstance(value, tuple) else value
        text = "null" if plain is None else plain if isinstance(plain, str) else repr(plain)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."
