"""Where processes run, and the distance between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum


class Distance(IntEnum):
    """How far elements travel between two processes."""

    RANK = 0  # the same process
    DEVICE = 1
    NODE = 2
    NETWORK = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a process runs.

    Args:
        device: numbered over all nodes; None where the process has none.
    """

    node: int = 0
    device: int | None = None

    def surroundings(self) -> Iterator[tuple[Distance, int]]:
        """Yields what is around the process, near to far; the nearest shared entry is the distance of two."""
        if self.device is not None:
            yield Distance.DEVICE, self.device
        yield Distance.NODE, self.node
        yield Distance.NETWORK, 0
