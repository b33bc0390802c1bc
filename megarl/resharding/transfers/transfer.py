"""The seam for ways to bring weights from trainers to engines: a way is one class in one file.

Common to all ways are the plan, the barrier, versions, checksums, and the control messages that say
that a message is ready and that a peer is gone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]  (public by its documentation)

from megarl.resharding.spec import SyncSpec
from megarl.resharding.sync_barrier import SyncBarrier
from megarl.resharding.transfers.cuda import NcclTransport
from megarl.resharding.transfers.gloo import GlooTransfer, GlooTransport
from megarl.weights.plan import Message

Transport = GlooTransport | NcclTransport

Write = Callable[[Sequence[torch.Tensor]], None]
"""Writes the elements of a message's copies to tensors of their dtypes and shapes."""


@dataclass(kw_only=True)
class Connection:
    """One rank's end of the connection of trainers and engines.

    Args:
        device: device of parameters, frames and receive buffers.
        store: keys of the connection, which the ranks share.
        control: transport of control messages: Gloo, which notices that a rank is gone.
        wire: transport of frames; None where this rank has none, or another way brings them.
        mapped: receive buffers in this process's memory, flat uint8, by receiver.
        ways: ways of messages, by whether ``RecvBufferPlan.via_network`` has their sender.
    """

    spec: SyncSpec
    rank: int
    device: torch.device
    store: Store
    barrier: SyncBarrier
    control: GlooTransport
    wire: Transport | None = None
    mapped: dict[int, torch.Tensor] = field(default_factory=dict)
    ways: dict[bool, WeightTransfer] = field(default_factory=dict)
    _notices: list[tuple[GlooTransfer, str]] = field(default_factory=list)

    @property
    def connected(self) -> bool:
        """Whether a sync is possible: not after ``abort`` or ``close``."""
        return self.control.connected

    def settle(self) -> None:
        """Waits for pending work on the device, before another process reads its result."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def notify(self, peer: int, tag: int, numbers: Sequence[int], what: str) -> None:
        """Sends a control message about ``what``, after pending work on the device; does not wait."""
        self.settle()
        self._notices.append((self.control.send(peer, tag, torch.tensor(numbers)), what))

    def drain(self) -> None:
        """Waits until all control messages have arrived; raises PeerError if a peer is gone."""
        for transfer, what in self._notices:
            transfer.wait(f"the message about {what} was not received")
        self._notices.clear()

    def abort(self) -> None:
        """Breaks the connection: every transfer fails at once, here and at the peers."""
        self.control.abort()
        for way in self.ways.values():
            way.abort()

    def close(self) -> None:
        """Ends the connection; no transfer may be pending."""
        self.control.close()
        for way in self.ways.values():
            way.release()
            way.close()
        self.ways.clear()  # they refer to the connection, and their memory must not wait for the garbage collector
        self.mapped.clear()


class WeightTransfer(ABC):
    """One rank's end of a way to bring messages into the receive buffers of their receivers.

    ``connect`` is called once. A sync calls ``prepare``, and ``begin`` when every rank has
    prepared; then, in order of the buckets, ``send`` for messages that this rank sends, ``expect``
    and ``receive`` for those to receive buffers that it owns; then ``finish``. Any exception aborts
    the sync on all ranks, with its text. Nothing may wait for longer than
    ``connection.spec.timeout_s``; ``connection.barrier.look_ahead()`` raises if another rank has
    aborted.
    """

    staging_bytes = 0
    """The memory of this rank's buffers in a sync."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    @abstractmethod
    def connect(self) -> None:
        """Connects to the other ranks; raises an error if that is not possible."""

    @abstractmethod
    def send(self, message: Message, write: Write) -> None:
        """Starts to send a message, after one call of ``write`` with memory of the connection's device.

        The receiver is notified afterwards.
        """

    @abstractmethod
    def receive(self, message: Message, targets: Sequence[torch.Tensor]) -> None:
        """Copies the message to targets, one for each of its copies; its sender has notified this rank."""

    @abstractmethod
    def abort(self) -> None:
        """Ends all transfers in progress; the connection is not used again. ``connect`` may have failed."""

    def close(self) -> None:  # noqa: B027  (a way may have none)
        """Ends the connection; no transfer is pending."""

    def prepare(self) -> None:  # noqa: B027  (a way may have none)
        """Allocates memory for a sync."""

    def begin(self) -> None:  # noqa: B027  (a way may have none)
        """Opens what other ranks have prepared."""

    def expect(self, messages: Sequence[Message]) -> None:  # noqa: B027  (a way may have none)
        """Starts to receive a bucket's messages, while the previous bucket is loaded."""

    def finish(self) -> None:  # noqa: B027  (a way may have none)
        """Waits until all messages that this rank sends have left its memory."""

    def release(self) -> None:  # noqa: B027  (a way may have none)
        """Frees memory until the next ``prepare``."""
