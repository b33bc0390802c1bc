"""The sender of a sync: packs boxes of local parameters to where the way of each message wants them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from megarl.resharding.buckets import Checksum, named, pack
from megarl.resharding.connection import Credits, Inbox, MessageReady, Outbox
from megarl.resharding.sync_barrier import SyncStats
from megarl.resharding.sync_rank import SyncRank
from megarl.resharding.transfers.transfer import Connection
from megarl.weights.plan import Message


class Sender(SyncRank):
    """Sends a rank's part of a plan.

    On CUDA, the rank also owns the receive buffer of the engine on its device, and receives the frames for it.

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

        A rank waits only for others' work on earlier buckets and for pending frames, so there is no deadlock.
        """
        outbox = Outbox(self._connection)
        credits = Credits(self._connection)
        for inbox in self._inboxes.values():
            inbox.expect(0)
        buckets = max([-1, *self._messages, *(len(inbox.messages) - 1 for inbox in self._inboxes.values())]) + 1
        for bucket in range(buckets):
            for message in self._messages.get(bucket, ()):
                self._deliver(message, credits, outbox, stats)
            for receiver, inbox in self._inboxes.items():
                self._pass_on(receiver, inbox, bucket, credits, outbox, stats)
        with stats.stage("transfer"):
            outbox.drain()

    def _deliver(self, message: Message, credits: Credits, outbox: Outbox, stats: SyncStats) -> None:
        """Sends a message by its way, and notifies the rank that reads it next."""
        checksum = Checksum(message, stats) if self._connection.spec.verify else None

        def write(targets: Sequence[torch.Tensor]) -> int:
            with stats.stage("pack"):
                return pack(message, self._params, targets, checksum)

        by_network = self._by_network(message)
        with stats.stage("transfer"):
            if not by_network:
                credits.wait(message)
            nbytes = self._connection.ways[by_network].send(message, write)
        stats.nbytes += nbytes
        stats.messages += 1
        peer = self._connection.spec.recv_buffers[message.receiver].owner if by_network else message.receiver
        ready = MessageReady(stats.version, message.bucket, nbytes, checksum.value if checksum else 0)
        outbox.send(peer, message.sender, ready, named(message))

    def _pass_on(
        self, receiver: int, inbox: Inbox, bucket: int, credits: Credits, outbox: Outbox, stats: SyncStats
    ) -> None:
        """Unpacks frames for the engine on this device, and notifies it."""
        if bucket >= len(inbox.messages):
            return
        with stats.stage("transfer"):
            for message in inbox.messages[bucket]:
                credits.wait(message)
            for message, _, ready in inbox.receive(bucket, stats.version):
                outbox.send(receiver, message.sender, ready, named(message))

    def _by_network(self, message: Message) -> bool:
        return self._plan.rank in self._connection.spec.recv_buffers[message.receiver].via_network
