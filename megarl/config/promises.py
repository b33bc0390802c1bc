"""Paths that are not there yet, because another run will write them before this one begins."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from megarl.config.problems import Problem


def is_promised(path: object, promised: Collection[Path]) -> bool:
    """Whether a path is missing now and lies in a directory that will be written.

    Args:
        path: of a configuration; what is no text is none.
        promised: the directories.
    """
    if not isinstance(path, str) or not promised or Path(path).exists():
        return False
    here = Path(path).resolve()
    return any(here.is_relative_to(directory.resolve()) for directory in promised)


def unpromised(problems: Iterable[Problem], raw: Mapping[str, Any], promised: Collection[Path]) -> list[Problem]:
    """The problems that stay when the promises are kept.

    Args:
        problems: of a configuration.
        raw: the configuration.
        promised: directories that will be written.
    """
    return [problem for problem in problems if not is_promised(_path(raw, problem.field), promised)]


def _path(raw: Mapping[str, Any], field: str) -> object:
    """What a field says, or the path in the section that it is."""
    value = functools.reduce(_at, field.split("."), cast(object, raw))
    below = _at(value, "path")
    return below if isinstance(value, Mapping) else value


def _at(value: object, key: str) -> object:
    return cast(Mapping[str, object], value).get(key) if isinstance(value, Mapping) else None
