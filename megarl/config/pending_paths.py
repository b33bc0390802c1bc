"""Paths that do not exist yet because another run writes them before this one begins."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from megarl.config.problems import Problem


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
