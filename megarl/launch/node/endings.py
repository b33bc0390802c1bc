"""How a job ends on a node: the first reason of all counts."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

_STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
_MISTAKE = 2

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a job.

    Args:
        exit_code: of the job.
        reason: for who reads it.
        node: that is at fault, if one is.
    """

    exit_code: int
    reason: str
    node: str | None = None

    @property
    def by_signal(self) -> bool:
        """Whether somebody has stopped the job; by other signals, processes fail."""
        return self.exit_code in _STOPPED

    @property
    def failed(self) -> bool:
        """Whether something has failed: Ray's logs are kept."""
        return self.exit_code not in (0, _MISTAKE) and not self.by_signal


class Ended(Exception):  # noqa: N818  (a job ends well, too)
    """The job is at its end, from where it is raised.

    Args:
        outcome: that it has.
    """

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.reason)
        self.outcome = outcome


async def until_the_end(course: Callable[[asyncio.TaskGroup], Awaitable[None]]) -> Outcome:
    """Runs a course, and what it adds to its group; all of it is cancelled when the first part ends the job."""
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_task(course, group))
    except* Exception as errors:
        first = errors.exceptions[0]
        if isinstance(first, Ended):
            outcome = first.outcome
        else:
            log.error("the node agent itself has failed", exc_info=first)
            outcome = Outcome(exit_code=1, reason=f"the node agent itself has failed: {first!r}")
    else:
        raise AssertionError("a course ends the job")
    return outcome


async def _task(course: Callable[[asyncio.TaskGroup], Awaitable[None]], group: asyncio.TaskGroup) -> None:
    await course(group)
