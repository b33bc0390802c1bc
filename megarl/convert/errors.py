"""What a conversion tells its user."""

from __future__ import annotations

from collections.abc import Sequence


class UsageError(ValueError):
    """The conversion cannot be done as asked; the message says how to ask for it."""


class BrokenError(ValueError):
    """Files are damaged, or are not what they should be; the message lists every problem."""

    def __init__(self, what: str, problems: Sequence[str]) -> None:
        super().__init__("\n  ".join([f"{what}:", *problems]))
