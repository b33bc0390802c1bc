"""Ports of a job: a block below the range from which systems give out ports, found from the job's number."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from dataclasses import dataclass

_FIRST, _SIZE, _BLOCKS = 10000, 100, 227
_CANDIDATES, _STRIDE = 8, 61
_FIXED = 11
"""Ports that must be free; Ray passes over those of the others that are taken."""


@dataclass(frozen=True, kw_only=True)
class Ports:
    """A block of ports, for all that listens of a job on a node.

    Args:
        first: of the block.
    """

    first: int

    @property
    def claim(self) -> int:
        """Nobody connects to it: who listens here has the block."""
        return self.first

    @property
    def rendezvous(self) -> int:
        """Where the agent of the first node listens for the others."""
        return self.first + 1

    @property
    def ray(self) -> range:
        """Of Ray, the head's own first."""
        return range(self.first + 2, self.first + _SIZE)


def candidates(job: int) -> tuple[Ports, ...]:
    """The blocks that a job's nodes try, in this order; the second is far from the first of the jobs around it."""
    return tuple(Ports(first=_FIRST + (job + step * _STRIDE) % _BLOCKS * _SIZE) for step in range(_CANDIDATES))


class Claim:
    """A block that is free on this machine, kept until it is closed.

    Args:
        blocks: to choose from, the first that is free.

    Raises:
        OSError: none is.
    """

    def __init__(self, blocks: Sequence[Ports]) -> None:
        for ports in blocks:
            claim = _listening(ports.claim)
            if claim is None:
                continue
            if all(_is_free(port) for port in range(ports.rendezvous, ports.first + _FIXED)):
                self._socket, self.ports = claim, ports
                return
            claim.close()
        tried = ", ".join(f"{ports.first}-{ports.first + _FIXED - 1}" for ports in blocks)
        raise OSError(errno.EADDRINUSE, f"each of these ranges has a port that is taken: {tried}")

    def close(self) -> None:
        """Lets another job have the block."""
        self._socket.close()


def _listening(port: int) -> socket.socket | None:
    try:
        return socket.create_server(("", port))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return None


def _is_free(port: int) -> bool:
    probe = _listening(port)
    if probe is not None:
        probe.close()
    return probe is not None
