"""Errors whose message is all that the user needs."""


class RunError(RuntimeError):
    """A run cannot go on; the message says all that its user needs to know."""


class UsageError(ValueError):
    """A command cannot be carried out as asked; the message says how to ask."""
