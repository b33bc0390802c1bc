"""Point-to-point transfers of byte buffers between the ranks of a sync."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import (
    ProcessGroupGloo,
    Store,  # pyright: ignore[reportPrivateImportUsage]  (public by its documentation)
    Work,
)

_ABORT_TAG = 2**31 - 1
_POLL_S = 0.0005
_LOOK_S = 0.1


class PeerError(RuntimeError):
    """A transfer failed; says with which rank."""


class Transfer(Protocol):
    """A transfer under way."""

    def wait(self) -> None:
        """Returns when the buffer has been sent or filled. Raises PeerError."""
        ...


class Transport(Protocol):
    """Carries buffers between ranks; those of one pair, direction and tag arrive in the order in which they were sent.

    Args:
        sent, received: bytes of completed transfers, by peer.
    """

    sent: Counter[int]
    received: Counter[int]

    @property
    def connected(self) -> bool:
        """Whether transfers are possible: not after ``abort`` or ``close``."""
        ...

    def send(self, peer: int, tag: int, buffer: torch.Tensor) -> Transfer:
        """Starts to send a contiguous buffer, which must not change until the transfer is complete."""
        ...

    def receive(self, peer: int, tag: int, buffer: torch.Tensor) -> Transfer:
        """Starts to fill a contiguous buffer with what the peer sends under this tag."""
        ...

    def abort(self) -> None:
        """Breaks the connections, so that every transfer fails, here and at the peers, at once."""
        ...

    def close(self) -> None:
        """Ends the connection; nothing may be under way."""
        ...


class GlooTransport:
    """Gloo over TCP, by a process group of its own: it neither uses nor changes the default group.

    Connects with its peers alone, and waits for them. GLOO_SOCKET_IFNAME names the network interfaces where a host has
    several.

    Args:
        store: of this group alone.
        members: the ranks in it, one of which is this process's, ``rank``.
        peers: those with which this one exchanges anything; the same is true of them.
        timeout_s: how long a transfer may take.

    Raises:
        RuntimeError: the network cannot be used, or a peer is gone.
    """

    def __init__(self, store: Store, members: Sequence[int], rank: int, peers: Sequence[int], timeout_s: float) -> None:
        self.sent: Counter[int] = Counter()
        self.received: Counter[int] = Counter()
        self._index = {member: i for i, member in enumerate(members)}
        group: Any = ProcessGroupGloo
        options = group._Options()
        options._timeout = timedelta(seconds=timeout_s)
        interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
        options._devices = [
            group.create_device(interface=interface, lazy_init=True) for interface in interfaces.split(",") if interface
        ] or [group.create_default_device(lazy_init=True)]
        self._group: Any = group(store, self._index[rank], len(members), options)
        self._peers = peers
        # Now, and not with the first transfer: when a peer is gone by then, Gloo may end this process (torch 2.13).
        hello, answer = torch.zeros(1, dtype=torch.uint8), torch.empty(1, dtype=torch.uint8)
        greetings = [self._group.send([hello], self._index[peer], 0) for peer in peers]
        for work in (*(self._group.recv([answer], self._index[peer], 0) for peer in peers), *greetings):
            work.wait()

    @property
    def connected(self) -> bool:
        return self._group is not None

    def send(self, peer: int, tag: int, buffer: torch.Tensor) -> Transfer:
        return _GlooTransfer(self._group.send([buffer], self._index[peer], tag), peer, buffer, self.sent)

    def receive(self, peer: int, tag: int, buffer: torch.Tensor) -> Transfer:
        return _GlooTransfer(self._group.recv([buffer], self._index[peer], tag), peer, buffer, self.received)

    def abort(self) -> None:
        if self._group is None:
            return
        # ProcessGroupGloo.abort does nothing (torch 2.13), and destruction waits for the last work object. A wait that
        # runs into its timeout makes Gloo close all connections of the group; there is none for a peer that is gone.
        for peer in self._peers:
            try:
                nothing = [torch.empty(1, dtype=torch.uint8)]
                self._group.recv(nothing, self._index[peer], _ABORT_TAG).wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                if "Timed out" in str(error):
                    break
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
        self._counter[self._peer] += self._buffer.nbytes


class NcclTransport:
    """NCCL between GPUs, of which no two ranks may share one, by a communicator of its own for each pair that talks.

    Args:
        store, members, rank, timeout_s: as of GlooTransport.
        look: called from time to time by whoever waits; raises where the sync has been aborted. Unlike a TCP
            connection, NCCL does not notice that a peer is gone.
    """

    def __init__(
        self, store: Store, members: Sequence[int], rank: int, timeout_s: float, look: Callable[[], None]
    ) -> None:
        from torch.distributed import ProcessGroupNCCL

        self.sent: Counter[int] = Counter()
        self.received: Counter[int] = Counter()
        self._index = {member: i for i, member in enumerate(members)}
        self._timeout_s, self._look = timeout_s, look
        options = ProcessGroupNCCL.Options()
        # NCCL's watchdog ends the process; whoever waits here gives up before.
        options._timeout = timedelta(seconds=4 * timeout_s)
        self._group: Any = ProcessGroupNCCL(store, self._index[rank], len(members), options)

    @property
    def connected(self) -> bool:
        return self._group is not None

    def send(self, peer: int, tag: int, buffer: torch.Tensor) -> Transfer:
        work = self._group.send([buffer], self._index[peer], 0)  # without tags: both sides keep to the buckets' order
        return _NcclTransfer(work, peer, buffer, self.sent, self._timeout_s, self._look)

    def receive(self, peer: int, tag: int, buffer: torch.Tensor) -> Transfer:
        work = self._group.recv([buffer], self._index[peer], 0)
        return _NcclTransfer(work, peer, buffer, self.received, self._timeout_s, self._look)

    def abort(self) -> None:
        if self._group is not None:
            self._group.abort()
        self._group = None

    def close(self) -> None:
        if self._group is not None:
            self._group.shutdown()
        self._group = None


class _NcclTransfer:
    def __init__(
        self,
        work: Work,
        peer: int,
        buffer: torch.Tensor,
        counter: Counter[int],
        timeout_s: float,
        look: Callable[[], None],
    ) -> None:
        self._work = work
        self._peer = peer
        self._buffer = buffer
        self._counter = counter
        self._timeout_s = timeout_s
        self._look = look

    def wait(self) -> None:
        start = looked = time.monotonic()
        try:
            while not self._work.is_completed():
                now = time.monotonic()
                if now - start > self._timeout_s:
                    raise PeerError(f"the transfer with rank {self._peer} took more than {self._timeout_s:g} s")
                if now - looked > _LOOK_S:
                    self._look()
                    looked = now
                time.sleep(_POLL_S)
            self._work.wait()  # the current stream sees the result
        except torch.distributed.DistError as error:
            raise PeerError(f"the transfer with rank {self._peer} failed: {error}") from error
        self._counter[self._peer] += self._buffer.nbytes
