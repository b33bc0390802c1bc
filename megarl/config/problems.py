"""The problems of a configuration, reported all at once."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import BaseModel

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


@dataclass(frozen=True)
class Problem:
    """A field (its dotted path), its value as text, the rule that it breaks, and the fix."""

    field: str
    value: str
    rule: str
    fix: str

    def __str__(self) -> str:
        return f"  {self.field} = {self.value}\n    rule: {self.rule}\n    fix:  {self.fix}"


class ConfigError(ValueError):
    """A configuration that cannot be run; the message lists every problem.

    Args:
        source: the file, for the heading.
        unchecked: subject of a sentence on the checks that the problems prevented; empty if there are none.
    """

    def __init__(self, problems: Sequence[Problem], source: str = "configuration", unchecked: str = "") -> None:
        self.problems = tuple(problems)
        self.unchecked = unchecked
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        later = [f"{unchecked} are checked once the above is corrected."] if unchecked else []
        super().__init__("\n".join([f"{source}: {count}", *map(str, problems), *later]))


def ineffective_settings(
    field: str, section: BaseModel, names: Sequence[str], where: str, otherwise: str
) -> Iterator[Problem]:
    """Yields a problem for each of the named fields of a section that has no effect and is not at its default.

    Args:
        field: path of the section.
        where: completes "has no effect".
        otherwise: completes "remove it, ".
    """
    for name in names:
        info = type(section).model_fields[name]
        value: object = getattr(section, name)
        if value != info.default:
            text: object = getattr(value, "name", "given") if isinstance(value, BaseModel) else value
            key = f"{field}.{info.alias or name}"
            rule = f"has no effect {where}"
            yield Problem(key, shown(text), rule, f"remove it, {otherwise}")


def correct_path(path: str) -> str:
    """Returns the fix for a path that does not exist: the nearest name there, or where a relative one is looked up."""
    parent = Path(path).parent
    there = [file.name for file in parent.iterdir()] if parent.is_dir() else []
    near = [] if Path(path).exists() else difflib.get_close_matches(Path(path).name, there, n=1)
    if near:
        return f"correct the path (did you mean {parent / near[0]}?)"
    return "correct the path" if Path(path).is_absolute() else f"correct the path (it is looked up in {Path.cwd()})"


def correct_model_path(path: str) -> str:
    """Returns the fix for a model's directory that does not exist; OWNER/NAME may be a model of the hub."""
    of_hub = _HUB_MODEL.fullmatch(path) and not Path(path).parent.exists()
    name = path if of_hub else "OWNER/NAME"
    return f"{correct_path(path)}; a model of the hub is downloaded by: hf download {name} --local-dir {path}"


def shown(value: object) -> str:
    """Returns a value as text of at most 80 characters."""
    if isinstance(value, Mapping):
        hidden = without_secrets(value, inside=True)
        text = yaml.safe_dump(hidden, default_flow_style=True, width=math.inf).strip()
    else:
        plain = list(cast(tuple[object, ...], value)) if isinstance(value, tuple) else value
        if plain is None:
            text = "null"
        else:
            text = plain if isinstance(plain, str) else repr(plain)
    return text if len(text) <= 80 else f"{text[:77]}..."


def without_secrets(value: Any, *, inside: bool = False) -> Any:
    """Returns plain values with MASK for functions' arguments whose names are those of secrets, whatever they hold.

    Args:
        inside: the value is of such arguments.
    """
    if isinstance(value, list):
        return [without_secrets(entry, inside=inside) for entry in cast(list[Any], value)]
    if not isinstance(value, Mapping):
        return value
    return {
        name: MASK
        if inside and _is_secret(str(name), entry)
        else without_secrets(entry, inside=inside or name == _ARGUMENTS)
        for name, entry in cast(Mapping[Any, Any], value).items()
    }


def _is_secret(name: str, value: Any) -> bool:
    found = _SECRET.search(name)
    if found is None or _SPECIAL_TOKEN.search(name) or not value or isinstance(value, bool):
        return False
    is_count = found["plural"] and isinstance(value, int | float)  # such as max_tokens
    return not is_count


def masked(value: Any, path: str = "") -> Iterator[str]:
    """Yields the paths of masked values in plain ones."""
    if value == MASK:
        yield path
    elif isinstance(value, Mapping):
        for name, entry in cast(Mapping[Any, Any], value).items():
            yield from masked(entry, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list):
        for index, entry in enumerate(cast(list[Any], value)):
            yield from masked(entry, f"{path}.{index}")


def is_pending(path: object, pending: Collection[Path]) -> bool:
    """Whether a path of a configuration is missing and lies in one of the pending directories."""
    if not isinstance(path, str) or not pending or Path(path).exists():
        return False
    return any(Path(path).resolve().is_relative_to(directory.resolve()) for directory in pending)


def without_pending(problems: Iterable[Problem], raw: Mapping[str, Any], pending: Collection[Path]) -> list[Problem]:
    """Returns the problems of a configuration that remain once the pending directories are written."""
    return [problem for problem in problems if not is_pending(_path(raw, problem.field), pending)]


def _path(raw: Mapping[str, Any], field: str) -> object:
    """Returns the value of a field, or the path in its section."""
    value: object = raw
    for key in field.split("."):
        value = cast(Mapping[str, object], value).get(key) if isinstance(value, Mapping) else None
    return cast(Mapping[str, object], value).get("path") if isinstance(value, Mapping) else value
