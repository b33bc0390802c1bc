"""Texts of models, harnesses and users, in output, messages and names."""

from __future__ import annotations

import io
import os
import sys
from typing import Final

_REASON: Final = 2000
_LINE: Final = 500
_NAME: Final = 200


def escape_output() -> None:
    """Makes this process, and the Python processes that it starts, print what cannot be encoded as escapes.

    Python refuses to print half of a surrogate pair, which any text of others may contain.
    """
    encoding = os.environ.get("PYTHONIOENCODING", "").partition(":")[0]
    os.environ["PYTHONIOENCODING"] = f"{encoding}:backslashreplace"
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def short_reason(reason: str) -> str:
    """Returns at most about 2 kB of a reason: its beginning and its end, and of each line the beginning."""
    lines = [line if len(line) <= _LINE else f"{line[:_LINE]}..." for line in reason.splitlines()]
    text = "\n".join(lines)
    if len(text) <= _REASON:
        return text
    half = _REASON // 2
    return f"{text[:half]}\n...\n{text[-half:]}"


def printable_name(name: object) -> str:
    """Returns at most 200 characters of a name, with escapes for those that cannot be printed or encoded."""
    characters = str(name)[:_NAME]
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in characters)
