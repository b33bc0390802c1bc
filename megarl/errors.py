"""Errors that end a command with their message alone, and how a terminal shows what others wrote."""

import os
from typing import Final

_SPACES: Final = "\n\t\u00a0\u3000"  # spaces that str.isprintable denies


def printable(text: str) -> str:
    """Returns a text for a terminal: control characters, which could change what it shows, are escaped."""
    return "".join(letter if letter.isprintable() or letter in _SPACES else ascii(letter)[1:-1] for letter in text)


class RunError(RuntimeError):
    """A run failed, for the reason in the message."""


class PreemptedError(Exception):
    """A run has saved and left before it would be stopped; started again, it goes on."""

    exit_code: Final = os.EX_TEMPFAIL


class UsageError(ValueError):
    """A command cannot be carried out; the message has the correct usage."""
