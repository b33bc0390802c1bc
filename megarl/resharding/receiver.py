"""The receiving side of a sync: verifies buckets, and loads each while the next one arrives."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping

import torch

from megarl.resharding.buckets import (
    Checksum,
    bucket_views,
    frames_bytes,
    named,
    recv_buffer_bytes,
    recv_views,
    split_frames,
    unpack,
)
from megarl.resharding.memory import RecvBuffer, make_recv_buffer
from megarl.resharding.spec import senders_of
from megarl.resharding.sync_barrier import SyncStats
from megarl.resharding.sync_round import SyncRound
from megarl.resharding.transport import PeerError, Transfer
from megarl.resharding.wire import Connection, MessageReady, Outbox, PendingMessage
from megarl.weights.plan import Message, ReceiverPlan
from megarl.weights.shard_map import Box


class FrameReceiver:
    """Receives frames for one receiver, on the buffer's owner; a bucket arrives while the previous one is loaded."""

    def __init__(self, connection: Connection, plan: ReceiverPlan) -> None:
        self._connection = connection
        self._plan = plan
        self._recv_buffer = connection.spec.recv_buffers[plan.rank]
        framed = self._recv_buffer.via_network
        self.messages = [[message for message in bucket if message.sender in framed] for bucket in plan.messages]
        self._wire = torch.empty(0, dtype=torch.uint8)
        self._arriving: list[tuple[Message, torch.Tensor, Transfer, PendingMessage]] = []

    @property
    def staging_bytes(self) -> int:
        """The size of the frames of a bucket."""
        return max(map(frames_bytes, self.messages), default=0)

    def begin(self) -> None:
        """Starts to receive the first bucket."""
        if self._wire.numel() < self.staging_bytes:
            self._wire = torch.empty(self.staging_bytes, dtype=torch.uint8, device=self._connection.device)
        self._receive(0)

    def receive(self, bucket: int, memory: torch.Tensor, stats: SyncStats) -> list[tuple[Message, MessageReady]]:
        """Waits for the frames of a bucket, unpacks them, and starts to receive the next bucket's."""
        arrived: list[tuple[Message, MessageReady]] = []
        views = bucket_views(memory, self._recv_buffer, bucket)
        for message, frame, transfer, awaited in self._arriving:
            try:
                transfer.wait()
            except PeerError as error:
                raise PeerError(f"rank {message.sender} did not deliver {named(message)}: {error}") from error
            arrived.append((message, awaited.wait(stats.version)))
            unpack(message, frame, recv_views(message, self._plan.buckets[bucket], views))
        self._receive(bucket + 1)
        return arrived

    def release(self) -> None:
        self._wire = torch.empty(0, dtype=torch.uint8)

    def _receive(self, bucket: int) -> None:
        messages = self.messages[bucket] if bucket < len(self.messages) else []
        wire = self._connection.wire
        self._arriving = []
        for message, frame in zip(messages, split_frames(self._wire, messages), strict=True):
            assert wire is not None, "frames come over the wire"
            transfer = wire.receive(message.sender, message.receiver, frame)
            self._arriving.append((message, frame, transfer, PendingMessage(self._connection, message, message.sender)))


Load = Callable[[Mapping[str, torch.Tensor], Box | None], None]
"""Loads a bucket, in the plan's order: parameters by local name, or with a box a part of one that is larger than a
bucket, in row-major order. The tensors are valid during the call only."""


class CorruptMessageError(RuntimeError):
    """A message's checksum is not its sender's."""


class Receiver:
    """Receives a rank's part of a plan in the memory of at most two buckets, and calls ``load`` for each bucket."""

    def __init__(self, connection: Connection, load: Load, *, version: int = -1) -> None:
        rank = connection.rank
        self._connection = connection
        self._load = load
        self._plan = connection.spec.receivers[rank]
        self._buffer_plan = connection.spec.recv_buffers[rank]
        self._round = SyncRound(connection, version)
        self._frames = FrameReceiver(connection, self._plan) if self._buffer_plan.owner == rank else None
        self._recv_buffer: RecvBuffer | None = None
        self._consistent = True

    @property
    def version(self) -> int:
        """The last version that all ranks have committed."""
        return self._round.version

    @property
    def consistent(self) -> bool:
        """False from the first load of a sync until its commit; after an abort, parameters are of two versions."""
        return self._consistent

    def receive(self, version: int) -> SyncStats:
        """Receives and loads every parameter; returns when all ranks have committed the version.

        Raises SyncError if the sync is aborted; the weights cannot be used if ``consistent`` is then False.
        """
        with self._round.sync(version, self._offer, self._join) as stats:
            self._receive(stats)
            self._connection.mapped.end_sync()
        self._consistent = True
        if self._connection.device.type != "cpu":
            self.release()
        return stats

    def release(self) -> None:
        """Frees the receive buffer until the next sync."""
        if self._recv_buffer is not None:
            self._recv_buffer.release()
        if self._frames is not None:
            self._frames.release()

    def _offer(self) -> None:
        """Checks that the plan brings every parameter, and offers this rank's memory."""
        self._check_plan()
        if self._frames is None:
            return
        if self._recv_buffer is None:
            self._recv_buffer = make_recv_buffer(recv_buffer_bytes(self._buffer_plan), self._connection.device)
        self._recv_buffer.prepare()
        for bucket in range(min(self._buffer_plan.depth, len(self._plan.buckets))):
            self._clear(bucket)
        if len(self._buffer_plan.via_network) < len(senders_of(self._plan)):
            self._connection.barrier.post(f"recv_buffer/{self._plan.rank}", self._recv_buffer.handle)

    def _join(self) -> None:
        """Maps the memory that a trainer owns for this rank."""
        if self._frames is None:
            rank = self._plan.rank
            self._connection.mapped.open(rank, self._connection.barrier.read(f"recv_buffer/{rank}"))
            for bucket in range(min(self._buffer_plan.depth, len(self._plan.buckets))):
                self._clear(bucket)
            self._connection.settle()

    def _receive(self, stats: SyncStats) -> None:
        """Loads bucket by bucket, while others fill the other half of the buffer, or the frames."""
        outbox = Outbox(self._connection)
        if self._frames is not None:
            self._frames.begin()
            stats.peak_staging_bytes = self._memory.numel() + self._frames.staging_bytes
        for index, bucket in enumerate(self._plan.buckets):
            views = bucket_views(self._memory, self._buffer_plan, index)
            for message, ready in self._arrivals(index, stats):
                if self._connection.spec.verify:
                    checksum = Checksum(message, stats)
                    for target in recv_views(message, bucket, views):
                        checksum.add(target)
                    if checksum.value != ready.checksum:
                        raise CorruptMessageError(
                            f"the message from rank {message.sender} for bucket {message.bucket} is corrupt: "
                            f"{named(message)}"
                        )
                stats.nbytes += ready.nbytes
                stats.messages += 1
            with stats.stage("load"):
                self._consistent = False
                self._load(views, bucket.box)
            self._free(index, outbox)
        with stats.stage("transfer"):
            outbox.drain()

    def _arrivals(self, index: int, stats: SyncStats) -> list[tuple[Message, MessageReady]]:
        """Waits for all messages of a bucket."""
        with stats.stage("transfer"):
            framed = [] if self._frames is None else self._frames.receive(index, self._memory, stats)
            senders = {message.sender for message, _ in framed}
            others = [message for message in self._plan.messages[index] if message.sender not in senders]
            pending = [PendingMessage(self._connection, message, self._writer(message)) for message in others]
            return [*framed, *((m, p.wait(stats.version)) for m, p in zip(others, pending, strict=True))]

    def _free(self, index: int, outbox: Outbox) -> None:
        """Lets others overwrite a loaded bucket."""
        following = index + self._buffer_plan.depth
        if following < len(self._plan.buckets):
            self._clear(following)
            for writer in sorted({self._writer(message) for message in self._plan.messages[following]}):
                if writer != self._plan.rank:
                    outbox.give_credit(writer, self._plan.rank, following)

    def _writer(self, message: Message) -> int:
        """Returns the rank that writes a message to the receive buffer."""
        return self._buffer_plan.owner if message.sender in self._buffer_plan.via_network else message.sender

    def _clear(self, index: int) -> None:
        """Zeroes parameters with padding, which no message writes, in a bucket's memory."""
        if padded := self._plan.padded.intersection(self._plan.buckets[index].params):
            views = bucket_views(self._memory, self._buffer_plan, index)
            for name in padded:
                views[name].zero_()

    @property
    def _memory(self) -> torch.Tensor:
        return self._connection.mapped[self._plan.rank] if self._recv_buffer is None else self._recv_buffer.memory

    def _check_plan(self) -> None:
        plan = self._plan
        if [name for bucket in plan.buckets if bucket.last for name in bucket.params] != list(plan.params):
            raise ValueError("the buckets are not the manifest's parameters in their order")
        arriving: Counter[str] = Counter()
        for copy in (copy for bucket in plan.messages for message in bucket for copy in message.copies):
            arriving[copy.target] += copy.target_box.size
        partial = [
            name
            for name, info in plan.params.items()
            if name not in plan.padded and arriving[name] != math.prod(info.shape)
        ]
        if partial:
            raise ValueError(f"the messages do not bring all of {', '.join(partial)}")
