"""Frames on their way out: packed into one half of the staging memory while the other half is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import torch

from megarl.resharding.buckets import frames_bytes, named, payload, split_frames
from megarl.resharding.connection import Connection
from megarl.resharding.notices import Notice, Outbox
from megarl.resharding.records import SyncStats
from megarl.resharding.transport import PeerError, Transfer
from megarl.weights.plans import Message

Pack = Callable[[Message, Sequence[torch.Tensor], SyncStats], Notice]
"""Writes a message's elements to their places; what there is to say of it."""


class Frames:
    """The messages of a rank that go over the wire.

    Args:
        connection: to the other ranks.
        messages: in order of their buckets.
        limit: of a batch, which one half of the memory holds, in bytes; a message may be as large.
        pack: fills a frame.
    """

    def __init__(self, connection: Connection, messages: Sequence[Message], limit: int, pack: Pack) -> None:
        self._connection, self._pack = connection, pack
        self._batches = {
            bucket: list(_batches(ours, limit))
            for bucket, ours in groupby(messages, key=lambda message: message.bucket)
        }
        sizes = [frames_bytes(batch) for batches in self._batches.values() for batch in batches]
        self._sizes = [max(sizes[i::2], default=0) for i in range(2)]
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._under_way: list[list[tuple[Message, Transfer]]] = [[], []]
        self._count = 0

    @property
    def staging_bytes(self) -> int:
        """Memory for two batches."""
        return sum(self._sizes)

    def begin(self) -> None:
        """A sync begins: there must be memory."""
        self._count = 0
        if self._memory.numel() < self.staging_bytes:
            self._memory = torch.empty(self.staging_bytes, dtype=torch.uint8, device=self._connection.device)

    def send(self, bucket: int, outbox: Outbox, stats: SyncStats) -> None:
        """Packs and starts to send the frames of a bucket.

        Waits, where both halves are under way, for the earlier one.
        """
        for batch in self._batches.get(bucket, ()):
            which = self._count % 2
            self._count += 1
            self._wait(which, stats)
            half = self._memory[: self._sizes[0]] if which == 0 else self._memory[self._sizes[0] :]
            for message, frame in zip(batch, split_frames(half, batch), strict=True):
                notice = self._pack(message, payload(message, frame), stats)
                port = self._connection.spec.landings[message.receiver].port
                assert self._connection.wire is not None, "frames go over the wire"
                transfer = self._connection.wire.send(port, message.receiver, frame)
                self._under_way[which].append((message, transfer))
                outbox.notify(port, message, notice)

    def drain(self, stats: SyncStats) -> None:
        """Waits until all have arrived.

        Raises:
            PeerError: a peer is gone.
        """
        for which in range(2):
            self._wait(which, stats)

    def release(self) -> None:
        """Gives the memory back."""
        self._memory = torch.empty(0, dtype=torch.uint8)

    def _wait(self, which: int, stats: SyncStats) -> None:
        with stats.stage("transfer"):
            for message, transfer in self._under_way[which]:
                try:
                    transfer.wait()
                except PeerError as error:
                    raise PeerError(f"rank {message.receiver} does not get {named(message)}: {error}") from error
        self._under_way[which].clear()


def _batches(messages: Iterator[Message], limit: int) -> Iterator[list[Message]]:
    """Consecutive messages whose frames take no more than the limit, or one message."""
    batch: list[Message] = []
    for message in messages:
        if batch and frames_bytes([*batch, message]) > limit:
            yield batch
            batch = []
        batch.append(message)
    if batch:
        yield batch
