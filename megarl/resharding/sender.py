"""The sender of a sync: packs boxes of local parameters to where the way of each message wants them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from megarl.resharding.buckets import Checksum, named, pack
from megarl.resharding.connection import Inbox, MessageReady
from megarl.resharding.sync_barrier import PeerError, SyncStats
from megarl.resharding.sync_rank import SyncRank
from megarl.resharding.transfers.transfer import Connection
from megarl.weights.plan import Message


class Sender(SyncRank):
    """Sends a rank's part of a plan.

    On CUDA, the rank also owns the receive buffer of the engine on its device.

    Args:
        params: local parameters, by the plan's names; every sync reads the mapping.
    """

    def __init__(self, connection: Connection, params: Mapping[str, torch.Tensor], *, version: int = -1) -> None:
        super().__init__(connection, version)
        spec = connection.spec
        self._params = params
        self._plan = spec.sender(connection.rank)
        self._inboxes = {r: Inbox(connection, spec.receivers[r]) for r in spec.owned(connection.rank)}
        self._messages: dict[int, list[Message]] = defaultdict(list)
        for message in sorted(self._plan.messages, key=lambda message: not self._by_network(message)):
            self._messages[message.bucket].append(message)
        self._buckets = max(self._messages, default=-1) + 1
        for inbox in self._inboxes.values():
            self._buckets = max(self._buckets, len(inbox.messages))
        self._granted: dict[int, int] = {}
        """The last bucket that this rank may write, by receiver."""

    def send(self, version: int) -> SyncStats:
        """Sends the current parameters; returns when all ranks have committed the version, or raises SyncError."""
        return self._sync(version, self._check_params, lambda: None, self._send)

    def _check_params(self) -> None:
        """Checks the parameters, listing all problems."""
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

        def write(targets: Sequence[torch.Tensor]) -> int:
            with stats.stage("pack"):
                return pack(message, self._params, targets, checksum)

        by_network = self._by_network(message)
        with stats.stage("transfer"):
            if not by_network:
                self._wait_for_memory(message)
            nbytes = self._connection.ways[by_network].send(message, write)
        stats.nbytes += nbytes
        stats.messages += 1
        peer = message.receiver
        if by_network:
            peer = self._connection.spec.recv_buffers[message.receiver].owner
        value = 0 if checksum is None else checksum.value
        ready = MessageReady(stats.version, message.bucket, nbytes, value)
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
            try:
                self._connection.control.receive(receiver, receiver, number).wait()
            except PeerError as error:
                raise PeerError(f"rank {receiver} takes no {named(message)}: {error}") from error
            self._granted[receiver] = int(number)

    def _by_network(self, message: Message) -> bool:
        return self._plan.rank in self._connection.spec.recv_buffers[message.receiver].via_network
