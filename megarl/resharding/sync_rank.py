"""The ranks of a sync: senders pack boxes of local parameters, receivers verify buckets and load them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch

from megarl.resharding.buckets import Checksum, bucket_views, named, pack
from megarl.resharding.connection import Inbox, MessageReady
from megarl.resharding.sync_barrier import PeerError, SyncStats, sync_places
from megarl.resharding.transfers.transfer import Connection
from megarl.weights.plan import Boxed, Message
from megarl.weights.shard_map import Box


class SyncRank:
    """One rank's part in the syncs over a connection; versions do not decrease, but may repeat.

    Attributes:
        version: last version that all ranks have committed.
    """

    def __init__(self, connection: Connection, version: int) -> None:
        self.version = version
        self._connection = connection
        self._count = 0

    def release(self) -> None:
        """Frees frames and receive buffers, which on a CPU are kept between syncs."""
        for way in self._connection.ways.values():
            way.release()

    def _sync(self, version: int, transfer: Callable[[SyncStats], None]) -> SyncStats:
        """Transfers one version; returns when all ranks have committed it.

        Before the transfers, all ranks meet twice: to agree on the version, and when all ways have
        begun. An error on any rank ends the sync on all; one in a transfer breaks the connection.
        Every rank raises SyncError, with the reason of the rank that failed first.
        """
        connection = self._connection
        barrier = connection.barrier
        ways = connection.ways.values()
        stats = SyncStats(version=version, peak_staging_bytes=sum(way.staging_bytes for way in ways))
        self._count += 1
        agreed, ready, done = sync_places(self._count)
        with stats.stage("agree"):
            with barrier.aborting(agreed):
                if not connection.connected:
                    problem = "its connection was closed, or broken by an aborted sync"
                    raise ValueError(f"{problem}; connect anew")
                if version < self.version:
                    latest = f"version {self.version}, which it has had"
                    raise ValueError(f"version {version} is below {latest}")
                self._check()
                for way in ways:
                    way.prepare()
            barrier.meet(agreed, {"version": f"{version}"})
            with barrier.aborting(ready):
                for way in ways:
                    way.begin()
                self._clear_buffer()
            barrier.meet(ready)
            for place in sync_places(self._count - 1):  # all ranks have left the previous sync
                barrier.forget(place)
        barrier.ahead = done
        try:
            with barrier.aborting(done):
                transfer(stats)
                for way in ways:
                    way.finish()
                with stats.stage("commit"):
                    barrier.meet(done)
        except Exception:
            connection.abort()
            raise
        self.version = version
        if connection.device.type != "cpu":
            self.release()
        return stats

    def _check(self) -> None:
        """Checks a sender's parameters against the plan."""

    def _clear_buffer(self) -> None:
        """Clears a receiver's buffer, before others write to it."""


class Sender(SyncRank):
    """Sends a rank's part of a plan.

    On CUDA, the rank also owns the receive buffer of the engine on its device.

    Args:
        params: local parameters, by the plan's names; every sync reads the mapping.
    """

    def __init__(
        self,
        connection: Connection,
        params: Mapping[str, Boxed],
        *,
        version: int = -1,
    ) -> None:
        super().__init__(connection, version)
        spec = connection.spec
        self._params = params
        self._plan = spec.sender(connection.rank)
        self._inboxes = {r: Inbox(connection, r) for r in spec.owned(connection.rank)}
        self._messages: dict[int, list[Message]] = defaultdict(list)
        for message in sorted(self._plan.messages, key=lambda message: not spec.by_network(message)):
            self._messages[message.bucket].append(message)
        self._buckets = max((len(buffer.buckets) for buffer in spec.recv_buffers.values()), default=0)
        self._granted: dict[int, int] = {}
        """The last bucket that this rank may write, by receiver."""

    def send(self, version: int) -> SyncStats:
        """Sends the current parameters; returns when all ranks have committed the version, or raises SyncError."""
        return self._sync(version, self._send)

    def _check(self) -> None:
        problems: list[str] = []
        for name, info in self._plan.params.items():
            if name not in self._params:
                problems.append(f"{name} is missing")
            elif tuple(self._params[name].shape) != info.shape:
                problems.append(f"{name} has shape {tuple(self._params[name].shape)}, planned was {info.shape}")
        if problems:
            raise ValueError("; ".join(problems))

    def _send(self, stats: SyncStats) -> None:
        """Sends bucket by bucket: frames first, which take time, then direct writes.

        A rank waits only for work on earlier buckets and pending frames, so there is no deadlock.
        """
        for receiver, buffer in self._connection.spec.recv_buffers.items():
            self._granted[receiver] = buffer.depth - 1
        for inbox in self._inboxes.values():
            inbox.expect(0)
        for bucket in range(self._buckets):
            for message in self._messages.get(bucket, ()):
                self._deliver(message, stats)
            for receiver, inbox in self._inboxes.items():
                if bucket < len(inbox.messages):
                    self._pass_on(receiver, inbox, bucket, stats)
        with stats.stage("transfer"):
            self._connection.drain()

    def _deliver(self, message: Message, stats: SyncStats) -> None:
        """Sends a message by its way, and notifies the rank that reads it next."""
        checksum = Checksum(message, stats) if self._connection.spec.verify else None

        written = 0

        def write(targets: Sequence[torch.Tensor]) -> None:
            nonlocal written
            with stats.stage("pack"):
                pack(message, self._params, targets, checksum)
            written += sum(target.nbytes for target in targets)

        by_network = self._connection.spec.by_network(message)
        with stats.stage("transfer"):
            if not by_network:
                self._wait_for_memory(message)
            self._connection.ways[by_network].send(message, write)
        if written != message.nbytes:
            raise PeerError(f"{named(message)}: {written} of {message.nbytes} bytes were written")
        stats.nbytes += message.nbytes
        stats.messages += 1
        peer = message.receiver
        if by_network:
            peer = self._connection.spec.recv_buffers[message.receiver].owner
        value = 0 if checksum is None else checksum.value
        ready = MessageReady(stats.version, message.bucket, value)
        self._connection.notify(peer, message.sender, ready, named(message))

    def _pass_on(self, receiver: int, inbox: Inbox, bucket: int, stats: SyncStats) -> None:
        """Unpacks frames for the engine on this device, and notifies it."""
        with stats.stage("transfer"):
            for message in inbox.messages[bucket]:
                self._wait_for_memory(message)
            for message, _, ready in inbox.receive(bucket, stats.version):
                self._connection.notify(receiver, message.sender, ready, named(message))

    def _wait_for_memory(self, message: Message) -> None:
        """Waits until the previous bucket in a message's memory is loaded; raises PeerError."""
        receiver = message.receiver
        while message.bucket > self._granted[receiver]:
            number = torch.empty(1, dtype=torch.int64)
            granted = self._connection.control.receive(receiver, receiver, number)
            granted.wait(f"rank {receiver} takes no {named(message)}")
            self._granted[receiver] = int(number)


Load = Callable[[Mapping[str, torch.Tensor], Box | None], None]
"""Loads a bucket, in the plan's order: parameters by local name, or with a box a part of one that
is larger than a bucket, in row-major order. The tensors are valid during the call only."""


class Receiver(SyncRank):
    """Receives a rank's part of a plan in the memory of at most two buckets, and calls ``load`` for each bucket.

    Attributes:
        consistent: whether all parameters are of one version; False from the first load of a sync
            until its commit.
    """

    def __init__(self, connection: Connection, load: Load, *, version: int = -1) -> None:
        super().__init__(connection, version)
        self._load = load
        self._plan = connection.spec.recv_buffers[connection.rank]
        self._inbox = Inbox(connection, connection.rank)
        self.consistent = True

    def receive(self, version: int) -> SyncStats:
        """Receives and loads every parameter; returns when all ranks have committed the version.

        Raises SyncError if the sync is aborted; only ``consistent`` weights can then be used.
        """
        stats = self._sync(version, self._receive)
        self.consistent = True
        return stats

    def _clear_buffer(self) -> None:
        for bucket in range(min(self._plan.depth, len(self._plan.buckets))):
            self._clear(bucket)
        self._connection.settle()

    def _receive(self, stats: SyncStats) -> None:
        """Loads bucket by bucket, while others fill the other half of the buffer, or the frames."""
        self._inbox.expect(0)
        for index, bucket in enumerate(self._plan.buckets):
            views = bucket_views(self._connection.mapped[self._plan.rank], self._plan, index)
            with stats.stage("transfer"):
                arrived = self._inbox.receive(index, stats.version)
            for message, targets, ready in arrived:
                if self._connection.spec.verify:
                    checksum = Checksum(message, stats)
                    for target in targets:
                        checksum.add(target)
                    if checksum.value != ready.checksum:
                        source = f"rank {message.sender} for bucket {message.bucket}"
                        raise PeerError(f"the message from {source} is corrupt: {named(message)}")
                stats.nbytes += message.nbytes
                stats.messages += 1
            with stats.stage("load"):
                self.consistent = False
                self._load(views, bucket.box)
            self._free(index)
        with stats.stage("transfer"):
            self._connection.drain()

    def _free(self, index: int) -> None:
        """Lets others overwrite a loaded bucket."""
        following = index + self._plan.depth
        if following >= len(self._plan.buckets):
            return
        self._clear(following)
        writers = {self._plan.writer(message) for message in self._plan.messages[following]}
        for writer in sorted(writers - {self._plan.rank}):
            what = f"the memory of bucket {following}"
            self._connection.notify(writer, self._plan.rank, [following], what)

    def _clear(self, index: int) -> None:
        """Zeroes parameters with padding, which no message writes, in a bucket's memory."""
        if padded := self._plan.padded.intersection(self._plan.buckets[index].params):
            views = bucket_views(self._connection.mapped[self._plan.rank], self._plan, index)
            for name in padded:
                views[name].zero_()
