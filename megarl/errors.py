"""What ends a run."""


class RunError(RuntimeError):
    """A run cannot go on; the message says all that its user needs to know."""
