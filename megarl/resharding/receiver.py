"""The receiving side of a sync: verifies buckets, and loads each while the next one arrives."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping

import torch

from megarl.resharding.buckets import Checksum, bucket_views, named
from megarl.resharding.connection import Inbox
from megarl.resharding.sync_barrier import PeerError, SyncStats
from megarl.resharding.sync_rank import SyncRank
from megarl.resharding.transfers.transfer import Connection
from megarl.weights.shard_map import Box

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
        self._plan = connection.spec.receivers[connection.rank]
        self._buffer_plan = connection.spec.recv_buffers[connection.rank]
        self._inbox = Inbox(connection, self._plan)
        self.consistent = True

    def receive(self, version: int) -> SyncStats:
        """Receives and loads every parameter; returns when all ranks have committed the version.

        Raises SyncError if the sync is aborted; only ``consistent`` weights can then be used.
        """
        stats = self._sync(version, self._check_plan, self._clear_buffer, self._receive)
        self.consistent = True
        return stats

    def _clear_buffer(self) -> None:
        for bucket in range(min(self._buffer_plan.depth, len(self._plan.buckets))):
            self._clear(bucket)
        self._connection.settle()

    def _receive(self, stats: SyncStats) -> None:
        """Loads bucket by bucket, while others fill the other half of the buffer, or the frames."""
        self._inbox.expect(0)
        for index, bucket in enumerate(self._plan.buckets):
            views = bucket_views(self._connection.mapped[self._plan.rank], self._buffer_plan, index)
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
                stats.nbytes += ready.nbytes
                stats.messages += 1
            with stats.stage("load"):
                self.consistent = False
                self._load(views, bucket.box)
            self._free(index)
        with stats.stage("transfer"):
            self._connection.drain()

    def _free(self, index: int) -> None:
        """Lets others overwrite a loaded bucket."""
        following = index + self._buffer_plan.depth
        if following >= len(self._plan.buckets):
            return
        self._clear(following)
        writers = {self._buffer_plan.writer(message) for message in self._plan.messages[following]}
        for writer in sorted(writers - {self._plan.rank}):
            what = f"the memory of bucket {following}"
            self._connection.notify(writer, self._plan.rank, [following], what)

    def _clear(self, index: int) -> None:
        """Zeroes parameters with padding, which no message writes, in a bucket's memory."""
        if padded := self._plan.padded.intersection(self._plan.buckets[index].params):
            views = bucket_views(self._connection.mapped[self._plan.rank], self._buffer_plan, index)
            for name in padded:
                views[name].zero_()

    def _check_plan(self) -> None:
        plan = self._plan
        loaded: list[str] = []
        for bucket in plan.buckets:
            if bucket.last:
                loaded += bucket.params
        if loaded != list(plan.params):
            raise ValueError("the buckets are not the manifest's parameters in their order")
        arriving: Counter[str] = Counter()
        for messages in plan.messages:
            for message in messages:
                for copy in message.copies:
                    arriving[copy.target] += copy.target_box.size
        partial: list[str] = []
        for name, info in plan.params.items():
            if name not in plan.padded and arriving[name] != math.prod(info.shape):
                partial.append(name)
        if partial:
            raise ValueError(f"the messages do not bring all of {', '.join(partial)}")
