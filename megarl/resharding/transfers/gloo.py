"""Gloo between CPUs: frames between nodes, and control messages everywhere."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.distributed import (
    ProcessGroupGloo,
    Store,  # pyright: ignore[reportPrivateImportUsage]  (public by its documentation)
    Work,
)

from megarl.resharding.sync_barrier import PeerError

_ABORT_TAG = 2**31 - 1


class GlooTransport:
    """Gloo over TCP, in a separate process group; GLOO_SOCKET_IFNAME names the network interfaces.

    Transfers arrive in order for each pair, direction and tag. The constructor raises RuntimeError
    if the network cannot be used, or a peer is gone.

    Args:
        store: store of this group only.
        peers: ranks to connect to, which is mutual; waits for them.
    """

    def __init__(
        self,
        store: Store,
        members: Sequence[int],
        rank: int,
        peers: Sequence[int],
        timeout_s: float,
    ) -> None:
        self._index = {member: i for i, member in enumerate(members)}
        group: Any = ProcessGroupGloo
        options = group._Options()
        options._timeout = timedelta(seconds=timeout_s)
        devices: list[Any] = []
        for interface in os.environ.get("GLOO_SOCKET_IFNAME", "").split(","):
            if interface:
                devices.append(group.create_device(interface=interface, lazy_init=True))
        options._devices = devices or [group.create_default_device(lazy_init=True)]
        self._group: Any = group(store, self._index[rank], len(members), options)
        self._peers = peers
        # Now, as Gloo may end this process if a peer is gone at the first transfer (torch 2.13).
        hello = torch.zeros(1, dtype=torch.uint8)
        answer = torch.empty(1, dtype=torch.uint8)
        greetings = [self._group.send([hello], self._index[peer], 0) for peer in peers]
        for peer in peers:
            self._group.recv([answer], self._index[peer], 0).wait()
        for greeting in greetings:
            greeting.wait()

    @property
    def connected(self) -> bool:
        """False after ``abort`` or ``close``."""
        return self._group is not None

    def send(self, peer: int, tag: int, buffer: torch.Tensor) -> GlooTransfer:
        """Starts to send a contiguous buffer, which must not change during the transfer."""
        start = partial(self._group.send, [buffer], self._index[peer], tag)
        return GlooTransfer(start, peer)

    def receive(self, peer: int, tag: int, buffer: torch.Tensor) -> GlooTransfer:
        """Starts to fill a contiguous buffer from the peer's transfer of this tag."""
        start = partial(self._group.recv, [buffer], self._index[peer], tag)
        return GlooTransfer(start, peer)

    def abort(self) -> None:
        """Breaks the connections: every transfer fails at once, here and at the peers."""
        if self._group is None:
            return
        # ProcessGroupGloo.abort does nothing (torch 2.13), and destruction waits for the last work
        # object. A wait that times out makes Gloo close all connections of the group; those to
        # peers that are gone are closed already.
        for peer in self._peers:
            try:
                nothing = [torch.empty(1, dtype=torch.uint8)]
                self._group.recv(nothing, self._index[peer], _ABORT_TAG).wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                if "Timed out" in str(error):
                    break
        self._group = None

    def close(self) -> None:
        """Ends the connection; no transfer may be pending."""
        self._group = None


class GlooTransfer:
    """A transfer; one that cannot start, because the peer is gone, fails in ``wait``."""

    def __init__(self, start: Callable[[], Work], peer: int) -> None:
        self._peer = peer
        try:
            self._work: Work | RuntimeError = start()
        except RuntimeError as error:
            self._work = error

    def wait(self, failure: str) -> None:
        """Returns when the buffer was sent or filled; raises PeerError, which begins with ``failure``."""
        try:
            if isinstance(self._work, RuntimeError):
                raise self._work
            self._work.wait()
        except RuntimeError as error:
            raise PeerError(f"{failure}: the transfer with rank {self._peer} failed: {error}") from error
