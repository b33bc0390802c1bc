"""The problems of a configuration, reported all at once."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import BaseModel

from megarl.config.schema.schema_walk import values_by_path
from megarl.texts import counted

MASK = "(secret)"
"""The value of a secret in the files of a run."""
_ARGUMENTS = "args"
_SECRET = re.compile(
    r"((api|access|auth|private|secret)[_-]?key|secret|passw(or)?d|credential|authorization|token)(?P<plural>s?)$", re.I
)
_SPECIAL_TOKEN = re.compile(r"(^|[_-])(bos|cls|end|eos|mask|pad|sep|start|stop|think|unk)[_-]tokens?$", re.I)
_HUB_MODEL = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
KEY = "(key)"
"""The value of a problem with the name of a key, which is the last part of the field."""
WITHOUT_EFFECT = "has no effect"
"""The beginning of the rule of a setting that could be left out."""


@dataclass(frozen=True)
class Problem:
    """A field (its dotted path), its value as text, the rule that it breaks, and the fix."""

    field: str
    value: str
    rule: str
    fix: str

    def __str__(self) -> str:
        return f"  {self.field} = {self.value}\n    rule: {self.rule}\n    fix:  {self.fix}"


Broken = Problem | tuple[str, str, str]
"""What a rule finds: a field, the rule and the fix, for the value of the field; or a problem with another value."""


class ConfigError(ValueError):
    """A configuration that cannot be run; the message lists every problem.

    Args:
        source: name of the file, for the heading.
        unchecked: subject of a sentence on the checks that the problems prevented;
            empty if there are none.
    """

    def __init__(self, problems: Sequence[Problem], source: str = "configuration", unchecked: str = "") -> None:
        self.problems = tuple(problems)
        self.unchecked = unchecked
        lines = [f"{source}: {counted(len(problems), 'problem')}", *map(str, problems)]
        if unchecked:
            lines.append(f"{unchecked} are checked once the above is corrected.")
        super().__init__("\n".join(lines))


def ineffective_settings(
    field: str, section: BaseModel, names: Sequence[str], where: str, otherwise: str
) -> Iterator[Broken]:
    """Yields each named field of a section that is not at its default, which has no effect.

    Args:
        field: path of the section.
        where: end of the rule "has no effect".
        otherwise: end of the fix "remove it, ".
    """
    for name in names:
        info = type(section).model_fields[name]
        if getattr(section, name) != info.default:
            yield f"{field}.{info.alias or name}", f"{WITHOUT_EFFECT} {where}", f"remove it, {otherwise}"


def did_you_mean(given: str, known: Sequence[str], cutoff: float = 0.6, above: str = "") -> str:
    """Returns the nearest known name, with what is above it, as a fix; empty if none is near."""
    near = difflib.get_close_matches(given, known, n=1, cutoff=cutoff)
    return f"did you mean {above}{near[0]}?" if near else ""


def correct_path(path: str) -> str:
    """Returns the fix for a path that does not exist: the nearest name, or the working directory."""
    given = Path(path)
    if given.parent.is_dir() and not given.exists():
        names = [file.name for file in given.parent.iterdir()]
        near = difflib.get_close_matches(given.name, names, n=1)
        if near:
            return f"correct the path (did you mean {given.parent / near[0]}?)"
    if given.is_absolute():
        return "correct the path"
    return f"correct the path (it is looked up in {Path.cwd()})"


def correct_model_path(path: str) -> str:
    """Returns the fix for a missing model directory; OWNER/NAME may be a model of the hub."""
    name = "OWNER/NAME"
    if _HUB_MODEL.fullmatch(path) and not Path(path).parent.exists():
        name = path
    return f"{correct_path(path)}; a model of the hub is downloaded by: hf download {name} --local-dir {path}"


def shown(value: object) -> str:
    """Returns a value as text of at most 80 characters, or as a whole path."""
    if isinstance(value, BaseModel):
        value = getattr(value, "name", None) or getattr(value, "path", None) or value
    if isinstance(value, str) and "/" in value and len(value.split()) == 1:
        return value
    value = _plain(value)
    if isinstance(value, Mapping | list):
        hidden = without_secrets(value, inside=True)
        text = yaml.safe_dump(hidden, default_flow_style=True, width=math.inf).strip()
    elif value is None or isinstance(value, bool):
        text = json.dumps(value)
    else:
        text = str(value)
    if len(text) > 80:
        return f"{text[:77]}..."
    return text


def _plain(value: object) -> object:
    """Returns a section as the keys that are given, and a tuple as a list."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", by_alias=True, exclude_unset=True)
    if isinstance(value, tuple):
        return [_plain(entry) for entry in cast(tuple[object, ...], value)]
    return value


def without_secrets(value: Any, *, inside: bool = False) -> Any:
    """Returns plain values with MASK for functions' arguments that have names of secrets.

    Args:
        inside: whether the value is one of such arguments.
    """
    if isinstance(value, list):
        return [without_secrets(entry, inside=inside) for entry in cast(list[Any], value)]
    if not isinstance(value, Mapping):
        return value
    masked: dict[Any, Any] = {}
    for name, entry in cast(Mapping[Any, Any], value).items():
        if inside and _is_secret(str(name), entry):
            masked[name] = MASK
        else:
            masked[name] = without_secrets(entry, inside=inside or name == _ARGUMENTS)
    return masked


def _is_secret(name: str, value: Any) -> bool:
    found = _SECRET.search(name)
    if found is None or _SPECIAL_TOKEN.search(name) or not value or isinstance(value, bool):
        return False
    is_count = found["plural"] and isinstance(value, int | float)  # such as max_tokens
    return not is_count


def masked(value: Any) -> Iterator[str]:
    """Yields the paths of masked values in plain ones."""
    for path, entry in values_by_path(value):
        if entry == MASK:
            yield path


def is_pending(path: object, pending: Collection[Path]) -> bool:
    """Whether a path of a configuration is missing and lies in one of the pending directories."""
    if not isinstance(path, str) or not pending or Path(path).exists():
        return False
    return any(Path(path).resolve().is_relative_to(directory.resolve()) for directory in pending)


def without_pending(problems: Iterable[Problem], raw: Mapping[str, Any], pending: Collection[Path]) -> list[Problem]:
    """Returns the problems that remain once the pending directories are written."""
    values = dict(values_by_path(raw))
    remaining: list[Problem] = []
    for problem in problems:
        path = values.get(f"{problem.field}.path", values.get(problem.field))
        if not is_pending(path, pending):
            remaining.append(problem)
    return remaining
