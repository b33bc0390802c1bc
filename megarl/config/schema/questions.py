"""Patterns that read texts, and templates that make a question of a response."""

from __future__ import annotations

import re
from string import Formatter
from typing import Annotated

from pydantic import AfterValidator


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"a regular expression: {error}") from None
    return pattern


def _compiles_with_group(pattern: str) -> str:
    if re.compile(_compiles(pattern)).groups != 1:
        raise ValueError("a regular expression with one group, in round brackets")
    return pattern


def _has_response(template: str) -> str:
    try:
        names = _names(template)
    except ValueError as error:
        raise ValueError(f"a text with names in braces; others are doubled: {error}") from None
    if "response" not in names:
        raise ValueError("a text with {response}")
    if wrong := [name for name in names if not name.isidentifier()]:
        raise ValueError(f"a text with prompt, response or a column in braces, not {{{wrong[0]}}}; others are doubled")
    return template


def _names(template: str) -> list[str]:
    """Returns what a template has in braces, with conversions and formats as part of the name."""
    names: list[str] = []
    for _, name, layout, conversion in Formatter().parse(template):
        if name is None:
            continue
        if conversion:
            name += f"!{conversion}"
        if layout:
            name += f":{layout}"
        names.append(name)
    return names


def template_columns(template: str) -> list[str]:
    """Returns the columns of a prompt's row that a template names."""
    return [name for name in dict.fromkeys(_names(template)) if name not in ("prompt", "response")]


Pattern = Annotated[str, AfterValidator(_compiles)]
PatternWithGroup = Annotated[str, AfterValidator(_compiles_with_group)]
Template = Annotated[str, AfterValidator(_has_response)]
