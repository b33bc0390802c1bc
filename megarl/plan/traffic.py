"""The traffic of a plan: bytes by rank and distance, and the time that links of given speeds need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from megarl.weights.plan import TransferPlan
from megarl.weights.planner import Holder
from megarl.weights.shard_map import ITEM_BYTES, ShardMap
from megarl.weights.topology import Distance

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The M messages of a plan between R ranks, which are numbered from 0 in their order.

    Args:
        ranks: [R] rank by number.
        sender, receiver: [M] numbers of ranks.
        bucket: [M] index of the receiver's bucket.
        distance: [M] a ``Distance``.
        nbytes: [M].
    """

    ranks: Ints
    sender: Ints
    receiver: Ints
    bucket: Ints
    distance: Ints
    nbytes: Ints

    @classmethod
    def of(cls, plan: TransferPlan, sources: Iterable[Holder], destinations: Iterable[Holder]) -> Traffic:
        holders = [{holder.rank: holder for holder in side} for side in (sources, destinations)]
        messages = [message for part in plan.senders.values() for message in part.messages]
        senders, receivers, bucket, _, nbytes = zip(*messages, strict=True) if messages else ((),) * 5
        ranks, numbers = np.unique(np.array((senders, receivers), dtype=np.int64), return_inverse=True)
        sender, receiver = numbers.reshape(2, -1)
        pairs, pair = np.unique(sender * len(ranks) + receiver, return_inverse=True)
        apart = [
            holders[0][int(ranks[a])].distance(holders[1][int(ranks[b])])
            for a, b in zip(*np.divmod(pairs, max(1, len(ranks))), strict=True)
        ]
        return cls(
            ranks=ranks,
            sender=sender,
            receiver=receiver,
            bucket=np.array(bucket, dtype=np.int64),
            distance=np.array(apart, dtype=np.int64)[pair],
            nbytes=np.array(nbytes, dtype=np.int64),
        )

    @cached_property
    def sent(self) -> Mapping[Distance, Ints]:
        """[R] bytes that each rank sends, by distance."""
        return {distance: self._bytes(self.sender, distance, len(self.ranks)) for distance in Distance}

    @cached_property
    def received(self) -> Mapping[Distance, Ints]:
        """[R] bytes that each rank receives, by distance."""
        return {distance: self._bytes(self.receiver, distance, len(self.ranks)) for distance in Distance}

    def messages(self, distance: Distance) -> int:
        return int(np.count_nonzero(self.distance == distance))

    def seconds(self, speeds: Mapping[Distance, float]) -> tuple[float, float]:
        """Estimates the duration.

        Ranks send and receive at the same time, at the link's speed in each direction, and use one link after the
        other. Packing, loading and congestion are ignored, and so is what stays in its rank.

        Args:
            speeds: bytes per second of a rank's links.

        Returns:
            Of the slowest rank alone; and the sum over buckets of each one's slowest rank, as if all ranks began every
                bucket
            together. A transfer with two buckets under way lies between them.
        """
        count, buckets = len(self.ranks), int(self.bucket.max(initial=-1)) + 1
        alone, together = np.zeros(count), np.zeros(buckets * count)
        for distance, speed in speeds.items():
            alone += np.maximum(self.sent[distance], self.received[distance]) / speed
            sent = self._bytes(self.bucket * count + self.sender, distance, buckets * count)
            received = self._bytes(self.bucket * count + self.receiver, distance, buckets * count)
            together += np.maximum(sent, received) / speed
        slowest = together.reshape(buckets, count).max(axis=1, initial=0.0)
        return float(alone.max(initial=0.0)), float(slowest.sum())

    def _bytes(self, where: Ints, distance: Distance, count: int) -> Ints:
        """[count] bytes of the messages of this distance, by an index of each."""
        chosen = self.distance == distance
        # Sums in float64, exact below 2**53 bytes.
        return np.bincount(where[chosen], weights=self.nbytes[chosen], minlength=count).astype(np.int64)


def content_bytes(shard_map: ShardMap) -> int:
    """Bytes of a map's parameters without padding."""
    item = {param: ITEM_BYTES[info.dtype] for param, info in shard_map.params.items()}
    return shard_map.nbytes - sum(padding.box.size * item[padding.param] for padding in shard_map.padding)
