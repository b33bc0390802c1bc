"""Texts of models, harnesses and users, in output, messages and names."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError

_REASON = 2000
_LINE = 500
_NAME = 200
_SPACES = "\n\t\u00a0\u3000"  # spaces that str.isprintable denies


def escape_output() -> None:
    """Makes this process, and the Python processes that it starts, print what cannot be encoded as escapes.

    Python refuses to print half of a surrogate pair, which any foreign text may contain.
    """
    encoding = os.environ.get("PYTHONIOENCODING", "").partition(":")[0]
    os.environ["PYTHONIOENCODING"] = f"{encoding}:backslashreplace"
    streams: list[Any] = [sys.stdout, sys.stderr]
    for stream in streams:
        if hasattr(stream, "reconfigure"):  # Ray's streams are wrappers, a notebook's cannot be reconfigured
            stream.reconfigure(errors="backslashreplace")


def printable(text: str) -> str:
    """Returns a text for a terminal: control characters, which could change what it shows, are escaped."""
    letters: list[str] = []
    for letter in text:
        is_shown = letter.isprintable() or letter in _SPACES
        letters.append(letter if is_shown else ascii(letter)[1:-1])
    return "".join(letters)


def short_reason(reason: str) -> str:
    """Shortens a reason to about 2 kB: its beginning and its end, with long lines cut."""
    lines = [line if len(line) <= _LINE else f"{line[:_LINE]}..." for line in reason.splitlines()]
    text = "\n".join(lines)
    if len(text) <= _REASON:
        return text
    half = _REASON // 2
    return f"{text[:half]}\n...\n{text[-half:]}"


def printable_name(name: object) -> str:
    """Returns at most 200 characters of a name, in one line, with escapes for those that cannot be encoded."""
    return printable(" ".join(str(name)[:_NAME].split()))


def argument_problems(error: ValidationError) -> str:
    """Returns what is wrong with arguments, by name, in one line."""
    problems: list[str] = []
    for entry in error.errors():
        name = ".".join(map(str, entry["loc"]))
        problems.append(f"{name}: {entry['msg']}")
    return "; ".join(problems)


def counted(count: int, noun: str) -> str:
    """Returns a count with its noun, such as `1 step`, `2 steps` and `2 mini-batches`."""
    if count == 1:
        return f"1 {noun}"
    if noun.endswith(("batch", "process")):
        return f"{count} {noun}es"
    return f"{count} {noun}s"
