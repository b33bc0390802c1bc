"""Where processes run, and how far apart they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum


class Distance(IntEnum):
    """How far elements travel from one process to another; nearer is less."""

    RANK = 0
    """Not at all: it is the same process."""
    DEVICE = 1
    """Between two processes on one device."""
    NODE = 2
    """Between two devices of one node."""
    NETWORK = 3
    """Between nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a process runs.

    Args:
        node: its machine, virtual or not.
        device: the number of its device over all nodes; None where it is on none.
    """

    node: int = 0
    device: int | None = None

    def surroundings(self) -> Iterator[tuple[Distance, int]]:
        """What is around a process, from near to far; two processes are as far apart as the nearest that they share."""
        if self.device is not None:
            yield Distance.DEVICE, self.device
        yield Distance.NODE, self.node
        yield Distance.NETWORK, 0
