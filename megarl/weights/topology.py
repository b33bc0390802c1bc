"""Where processes run, and the distance between them."""

from __future__ import annotations

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
