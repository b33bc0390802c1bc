"""Errors that end a command with their message alone."""


class RunError(RuntimeError):
    """A run failed, for the reason in the message."""


class UsageError(ValueError):
    """A command cannot be carried out; the message has the correct usage."""
