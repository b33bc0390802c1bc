"""Point-to-point transfers of byte buffers between the ranks of a sync."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]  (public by its documentation)
    ProcessGroupGloo,
    Store,  # pyright: ignore[reportPrivateImportUsage]
    Work,
)

_ABORT_TAG = 2**31 - 1
_POLL_S = 0.0005
_LOOK_S = 0.1


class PeerError(RuntimeError):
    """A transfer failed; the message names the rank."""


class GlooTransport:
    """Gloo over TCP, in a process group of its own; GLOO_SOCKET_IFNAME names the network interfaces.

    Transfers arrive in order for each pair, direction and tag; ``sent`` and ``received`` count completed bytes by peer.
    The constructor raises RuntimeError if the network cannot be used, or a peer is gone.

    Args:
        store: of this group only.
        members: the ranks of the group.
        peers: ranks to connect to, which is mutual; waits for them.
        timeout_s: of a transfer.
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
        # Connects now: if a peer is gone at the first transfer, Gloo may end this process (torch 2.13).
        hello = torch.zeros(1, dtype=torch.uint8)
        answer = torch.empty(1, dtype=torch.uint8)
        greetings = [self._group.send([hello], self._index[peer], 0) for peer in peers]
        for work in (*(self._group.recv([answer], self._index[peer], 0) for peer in peers), *greetings):
            work.wait()

    @property
    def connected(self) -> bool:
        """False after ``abort`` or ``close``."""
        return self._group is not None

    def send(self, peer: int, tag: int, buffer: torch.Tensor) -> Transfer:
        """Starts to send a contiguous buffer, which must not change during the transfer."""
        return _GlooTransfer(lambda: self._group.send([buffer], self._index[peer], tag), peer, buffer, self.sent)

    def receive(self, peer: int, tag: int, buffer: torch.Tensor) -> Transfer:
        """Starts to fill a contiguous buffer from the peer's transfer of this tag."""
        return _GlooTransfer(lambda: self._group.recv([buffer], self._index[peer], tag), peer, buffer, self.received)

    def abort(self) -> None:
        """Breaks the connections: every transfer fails at once, here and at the peers."""
        if self._group is None:
            return
        # ProcessGroupGloo.abort does nothing (torch 2.13), and destruction waits for the last work object. A wait that
        # times out makes Gloo close all connections of the group; those to peers that are gone are closed already.
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


class _GlooTransfer:
    """A transfer; one that cannot start, because the peer is gone, fails in ``wait``."""

    def __init__(self, start: Callable[[], Work], peer: int, buffer: torch.Tensor, counter: Counter[int]) -> None:
        self._peer = peer
        self._buffer = buffer
        self._counter = counter
        try:
            self._work: Work | RuntimeError = start()
        except RuntimeError as error:
            self._work = error

    def wait(self) -> None:
        try:
            if isinstance(self._work, RuntimeError):
                raise self._work
            self._work.wait()
        except RuntimeError as error:
            raise PeerError(f"the transfer with rank {self._peer} failed: {error}") from error
        self._counter[self._peer] += self._buffer.nbytes


class NcclTransport:
    """NCCL between GPUs, one rank each; see ``GlooTransport`` for the other arguments.

    Each pair has a communicator per direction: transfers of one communicator queue up on a stream, so two ranks that
    both receive before they send would deadlock. Every rank connects to its peers at once and in order, so that there
    is no deadlock.

    Args:
        to, from_: peers to which this rank sends, and from which it receives.
        look: called now and then while waiting, as NCCL does not notice that a peer is gone; raises if the sync was
            aborted.
    """

    def __init__(
        self,
        store: Store,
        members: Sequence[int],
        rank: int,
        *,
        to: Collection[int],
        from_: Collection[int],
        device: torch.device,
        timeout_s: float,
        look: Callable[[], None],
    ) -> None:
        from torch.distributed import ProcessGroupNCCL

        self.sent: Counter[int] = Counter()
        self.received: Counter[int] = Counter()
        self._index = {member: i for i, member in enumerate(members)}
        self._rank = rank
        self._timeout_s = timeout_s
        self._look = look
        options = ProcessGroupNCCL.Options()
        # NCCL's watchdog ends the process; waits here time out earlier.
        options._timeout = timedelta(seconds=4 * timeout_s)
        self._groups: dict[bool, Any] = {
            upwards: ProcessGroupNCCL(PrefixStore(name, store), self._index[rank], len(members), options)
            for upwards, name in ((True, "up"), (False, "down"))
        }
        hello = torch.zeros(1, dtype=torch.uint8, device=device)
        for peer in sorted({*to, *from_}):
            for upwards in (True, False):
                if upwards == (rank < peer):
                    if peer in to:
                        self.send(peer, 0, hello).wait()
                elif peer in from_:
                    self.receive(peer, 0, hello).wait()
        self.sent.clear()
        self.received.clear()

    @property
    def connected(self) -> bool:
        return bool(self._groups)

    def send(self, peer: int, tag: int, buffer: torch.Tensor) -> Transfer:
        # Without tags, as both sides use the same order.
        work = self._groups[self._rank < peer].send([buffer], self._index[peer], 0)
        return _NcclTransfer(work, peer, buffer, self.sent, self._timeout_s, self._look)

    def receive(self, peer: int, tag: int, buffer: torch.Tensor) -> Transfer:
        work = self._groups[peer < self._rank].recv([buffer], self._index[peer], 0)
        return _NcclTransfer(work, peer, buffer, self.received, self._timeout_s, self._look)

    def abort(self) -> None:
        for group in self._groups.values():
            group.abort()
        self._groups.clear()

    def close(self) -> None:
        for group in self._groups.values():
            group.shutdown()
        self._groups.clear()


@dataclass(frozen=True)
class _NcclTransfer:
    work: Work
    peer: int
    buffer: torch.Tensor
    counter: Counter[int]
    timeout_s: float
    look: Callable[[], None]

    def wait(self) -> None:
        start = looked = time.monotonic()
        try:
            while not self.work.is_completed():
                now = time.monotonic()
                if now - start > self.timeout_s:
                    raise PeerError(f"the transfer with rank {self.peer} took more than {self.timeout_s:g} s")
                if now - looked > _LOOK_S:
                    self.look()
                    looked = now
                time.sleep(_POLL_S)
            self.work.wait()  # orders the current stream after the transfer
        except torch.distributed.DistError as error:
            raise PeerError(f"the transfer with rank {self.peer} failed: {error}") from error
        self.counter[self.peer] += self.buffer.nbytes


Transport = GlooTransport | NcclTransport
Transfer = _GlooTransfer | _NcclTransfer
"""``wait`` returns when the buffer was sent or filled, or raises PeerError."""
