"""The connection of one rank of a sync with the others, and the messages that it waits for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]  (public by its documentation)

from megarl.plugins import resolve_class
from megarl.resharding.buckets import bucket_views, named, recv_views
from megarl.resharding.spec import SyncSpec
from megarl.resharding.sync_barrier import CONNECTING, PeerError, SyncBarrier, open_store
from megarl.resharding.transfers.frames import Frames
from megarl.resharding.transfers.gloo import GlooTransfer, GlooTransport
from megarl.resharding.transfers.shared_memory import SharedMemory
from megarl.resharding.transfers.transfer import Connection, WeightTransfer
from megarl.weights.plan import Message


def connect(spec: SyncSpec, rank: int, device: torch.device | str = "cpu") -> Connection:
    """Connects a rank with all others; raises SyncError if one is missing, has another plan, or no network."""
    store = open_store(spec.host, spec.port, spec.name)
    barrier = SyncBarrier(store, rank, spec.world_size, spec.timeout_s)
    start, done = CONNECTING
    barrier.meet(start, {"plan": spec.fingerprint, "verify": f"{spec.verify}"})
    barrier.ahead = done
    with ExitStack() as opened:  # until all ranks are connected
        with barrier.aborting(done, "could not connect: "):
            control = GlooTransport(
                PrefixStore("control", store),
                range(spec.world_size),
                rank,
                spec.peers(rank),
                spec.timeout_s,
            )
            connection = Connection(
                spec=spec,
                rank=rank,
                device=torch.device(device),
                store=store,
                barrier=barrier,
                control=control,
            )
            opened.callback(connection.abort)
            connection.ways[False] = SharedMemory(connection)
            if rank in spec.wire:
                network: type[WeightTransfer] = Frames
                if ":" in spec.transport:
                    network = resolve_class(spec.transport, WeightTransfer)
                connection.ways[True] = network(connection)
            for way in connection.ways.values():
                way.connect()
        barrier.meet(done)
        opened.pop_all()
    return connection


class MessageReady(NamedTuple):
    """The control message that a message was delivered; ``checksum`` is 0 without verification."""

    version: int
    bucket: int
    checksum: int


class Inbox:
    """The messages of a receive buffer for which this rank waits.

    A receiver waits for all of them; a trainer that owns the buffer of another rank, for those of
    the network. A bucket arrives while the previous one is loaded.

    Attributes:
        messages: messages by bucket.
    """

    def __init__(self, connection: Connection, receiver: int) -> None:
        buffer = connection.spec.recv_buffers[receiver]
        network = buffer.network_messages
        self.messages = buffer.messages if receiver == connection.rank else network
        self._connection = connection
        self._buffer = buffer
        self._network = network if buffer.owner == connection.rank else []
        self._pending: list[tuple[Message, torch.Tensor, GlooTransfer]] = []

    def expect(self, bucket: int) -> None:
        """Starts to receive the messages of a bucket, if there is one."""
        self._pending = []
        if bucket >= len(self.messages):
            return
        if self._network and self._network[bucket]:
            self._connection.ways[True].expect(self._network[bucket])
        for message in self.messages[bucket]:
            peer = message.sender if self._by_network(message) else self._buffer.writer(message)
            numbers = torch.empty(len(MessageReady._fields), dtype=torch.int64)
            transfer = self._connection.control.receive(peer, message.sender, numbers)
            self._pending.append((message, numbers, transfer))

    def receive(self, bucket: int, version: int) -> list[tuple[Message, Sequence[torch.Tensor], MessageReady]]:
        """Waits for the messages of a bucket, and starts to receive the next bucket's.

        Raises PeerError if a message does not come or does not match the plan.

        Returns:
            Messages, with their elements and control messages.
        """
        arrived: list[tuple[Message, Sequence[torch.Tensor], MessageReady]] = []
        views = bucket_views(self._connection.mapped[self._buffer.rank], self._buffer, bucket)
        for message, numbers, transfer in self._pending:
            transfer.wait(f"rank {message.sender} did not deliver {named(message)}")
            ready = MessageReady(*numbers.tolist())
            if (ready.version, ready.bucket) != (version, bucket):
                what = f"version {ready.version}, bucket {ready.bucket} for {named(message)}"
                planned = f"version {version}, bucket {bucket}"
                raise PeerError(f"rank {message.sender} delivered {what}; planned was {planned}")
            targets = recv_views(message, self._buffer.buckets[bucket], views)
            if self._by_network(message):
                self._connection.ways[True].receive(message, targets)
            arrived.append((message, targets, ready))
        self.expect(bucket + 1)
        return arrived

    def _by_network(self, message: Message) -> bool:
        return bool(self._network) and message.sender in self._buffer.via_network
