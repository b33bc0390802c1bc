"""The traffic of a transfer plan: bytes by rank and distance, and the time over links of given speeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from megarl.weights.plan import TransferPlan
from megarl.weights.planner import Distance, Holder

Ints = npt.NDArray[np.int64]


class Traffic:
    """The M messages of a plan between R ranks, which are numbered from 0 in their order.

    Attributes:
        sender, receiver, bucket, distance, nbytes: [M]; buckets are the receiver's.
        sent, received: [R] bytes of each rank, by distance.
    """

    def __init__(self, plan: TransferPlan, sources: Iterable[Holder], destinations: Iterable[Holder]) -> None:
        source_of = {holder.rank: holder for holder in sources}
        destination_of = {holder.rank: holder for holder in destinations}
        rows: list[tuple[int, int, int, int]] = []
        for part in plan.senders.values():
            for message in part.messages:
                rows.append((message.sender, message.receiver, message.bucket, message.nbytes))
        columns = np.array(rows, dtype=np.int64).reshape(-1, 4).T
        ranks, numbers = np.unique(columns[:2], return_inverse=True)
        self._ranks = len(ranks)
        self.sender, self.receiver = numbers.reshape(2, -1)
        self.bucket = columns[2]
        self.nbytes = columns[3]
        pairs, pair = np.unique(self.sender * self._ranks + self.receiver, return_inverse=True)
        distances: list[int] = []
        for number in pairs.tolist():
            sender, receiver = divmod(number, self._ranks)
            source = source_of[int(ranks[sender])]
            distances.append(source.distance(destination_of[int(ranks[receiver])]))
        self.distance = np.array(distances, dtype=np.int64)[pair]
        self.sent: dict[Distance, Ints] = {}
        self.received: dict[Distance, Ints] = {}
        for distance in Distance:
            self.sent[distance] = self._bytes(self.sender, distance, self._ranks)
            self.received[distance] = self._bytes(self.receiver, distance, self._ranks)

    def messages(self, distance: Distance) -> int:
        return int(np.count_nonzero(self.distance == distance))

    def seconds(self, speeds: Mapping[Distance, float]) -> tuple[float, float]:
        """Estimates the duration as (of the slowest rank alone, of all ranks in step).

        In step, all ranks begin every bucket together: the sum over buckets of each one's slowest
        rank. A transfer with two buckets under way lies between the two. Ranks send and receive at
        the same time, at the link's speed in each direction, and use one link after the other;
        packing, loading and congestion are ignored.

        Args:
            speeds: bytes per second of a rank's links.
        """
        count = self._ranks
        buckets = int(self.bucket.max(initial=-1)) + 1
        alone = np.zeros(count)
        together = np.zeros(buckets * count)
        for distance, speed in speeds.items():
            alone += np.maximum(self.sent[distance], self.received[distance]) / speed
            sent = self._bytes(self.bucket * count + self.sender, distance, buckets * count)
            received = self._bytes(self.bucket * count + self.receiver, distance, buckets * count)
            together += np.maximum(sent, received) / speed
        slowest = together.reshape(buckets, count).max(axis=1, initial=0.0)
        return float(alone.max(initial=0.0)), float(slowest.sum())

    def _bytes(self, index: Ints, distance: Distance, count: int) -> Ints:
        """Returns the bytes at this distance by index of their messages, [count]."""
        chosen = self.distance == distance
        # Sums in float64, exact below 2**53 bytes.
        return np.bincount(index[chosen], weights=self.nbytes[chosen], minlength=count).astype(np.int64)
