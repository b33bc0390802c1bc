"""Point-to-point transfers of byte buffers between the ranks of a sync."""

from __future__ import annotations

import socket
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]  (public by its documentation)
    ProcessGroupGloo,
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
    Work,
)

from megarl.resharding.board import Board
from megarl.resharding.records import SyncSpec

_ABORT_TAG = 2**31 - 1

_STORE_TIMEOUT = timedelta(seconds=60)
"""To reach the store, which is there before the ranks hear of it."""


class PeerError(RuntimeError):
    """A transfer failed; says with which rank."""


class Transfer(Protocol):
    """A transfer under way."""

    def wait(self) -> None:
        """Returns when the buffer has been sent or filled. Raises PeerError."""
        ...


class Transport(Protocol):
    """Carries buffers between the ranks of one connection.

    Args:
        rank, size: this rank of how many.
        board: where they meet.
        sent, received: bytes of completed transfers, by peer.
    """

    rank: int
    size: int
    board: Board
    sent: Counter[int]
    received: Counter[int]

    @property
    def connected(self) -> bool:
        """Whether transfers are possible: not after ``abort`` or ``close``."""
        ...

    def send(self, peer: int, tag: int, buffer: torch.Tensor) -> Transfer:
        """Starts to send a flat uint8 buffer, which must not change until the transfer is complete."""
        ...

    def receive(self, peer: int, tag: int, buffer: torch.Tensor) -> Transfer:
        """Starts to fill a flat uint8 buffer with what the peer sends under this tag."""
        ...

    def abort(self) -> None:
        """Breaks the connections, so that every transfer fails, here and at the peers, at once."""
        ...

    def close(self) -> None:
        """Ends the connection; nothing may be under way."""
        ...


class GlooTransport:
    """Gloo over TCP, by a process group of its own: it neither uses nor changes the default group.

    Waits for all ranks of the connection. GLOO_SOCKET_IFNAME names the network interface where a host has several.

    Args:
        spec: names the store and the connection.
        rank: this process's rank in it.

    Raises:
        SyncError: some rank did not come, or could not connect.
    """

    def __init__(self, spec: SyncSpec, rank: int) -> None:
        self.rank = rank
        self.size = spec.world_size
        self.sent: Counter[int] = Counter()
        self.received: Counter[int] = Counter()
        timeout = timedelta(seconds=spec.timeout_s)
        store = PrefixStore(spec.name, TCPStore(spec.host, spec.port, is_master=False, timeout=_STORE_TIMEOUT))
        self.board = Board(store, rank, self.size, spec.timeout_s)
        self.board.meet("connect/start")
        try:
            self._group: Any = ProcessGroupGloo(PrefixStore("gloo", store), rank, self.size, timeout)
        except RuntimeError as error:
            self.board.abort("connect/start", f"could not connect: {error}")

    @property
    def connected(self) -> bool:
        return self._group is not None

    def send(self, peer: int, tag: int, buffer: torch.Tensor) -> Transfer:
        return _GlooTransfer(self._group.send([buffer], peer, tag), peer, buffer, self.sent)

    def receive(self, peer: int, tag: int, buffer: torch.Tensor) -> Transfer:
        return _GlooTransfer(self._group.recv([buffer], peer, tag), peer, buffer, self.received)

    def abort(self) -> None:
        if self._group is None or self.size == 1:
            return
        # ProcessGroupGloo.abort does nothing (torch 2.13), and destruction waits for the last work object. A wait
        # that runs into its timeout makes Gloo close all connections of the group.
        with suppress(RuntimeError):
            self._group.recv([torch.empty(1, dtype=torch.uint8)], (self.rank + 1) % self.size, _ABORT_TAG).wait(
                timedelta(milliseconds=1)
            )
        self._group = None

    def close(self) -> None:
        self._group = None


class _GlooTransfer:
    def __init__(self, work: Work, peer: int, buffer: torch.Tensor, counter: Counter[int]) -> None:
        self._work = work
        self._peer = peer
        self._buffer = buffer
        self._counter = counter

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise PeerError(f"the transfer with rank {self._peer} failed: {error}") from error
        self._counter[self._peer] += self._buffer.numel()


def serve_store(host: str = "127.0.0.1", port: int = 0) -> TCPStore:
    """The store at which the ranks of a sync meet; it lives as long as the object.

    Args:
        host: the address, of this machine, at which alone it listens; the store has no other protection.
        port: 0 for any free one, found in ``.port``.
    """
    # A TCPStore that opens its port itself listens on all addresses, whichever host it is given (torch 2.13).
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server(address[:2], family=family)
    port = listener.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
