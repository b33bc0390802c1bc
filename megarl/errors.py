"""Errors that end a command with their message alone."""

import os
from typing import Final


class RunError(RuntimeError):
    """A run failed, for the reason in the message."""


class PreemptedError(Exception):
    """A run has saved and left before it would be stopped; started again, it continues."""

    exit_code: Final = os.EX_TEMPFAIL


class UsageError(ValueError):
    """A command cannot be carried out; the message has the correct usage."""
