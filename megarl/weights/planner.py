"""The planner: which rank sends which elements to which.

Holders with equal shard maps are replicas. Maps are matched once per distinct destination map;
replicas differ only in their senders and in the order of their buckets.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from itertools import pairwise
from operator import attrgetter

from megarl.garbage_collection import collector_paused
from megarl.weights.plan import Bucket, Copy, Message, ReceiverPlan, SenderPlan, TransferPlan
from megarl.weights.shard_map import ITEM_BYTES, Box, ShardMap, TensorInfo
from megarl.weights.source_index import Owners, Route, SourceIndex


class Distance(IntEnum):
    """How far elements travel between two processes."""

    RANK = 0  # the same process
    DEVICE = 1
    NODE = 2
    NETWORK = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a process runs.

    Args:
        device: numbered over all nodes; None where the process has none.
    """

    node: int = 0
    device: int | None = None


@dataclass(frozen=True, kw_only=True)
class Holder(Place):
    """A process, or a set of files, that holds weights.

    Args:
        rank: number of the process; a source and a destination may be the same one.
        map: shard map; replicas should share one object, which saves comparisons.
    """

    rank: int
    map: ShardMap

    def distance(self, other: Holder) -> Distance:
        theirs = set(other.surroundings())
        return next(distance for distance, place in self.surroundings() if (distance, place) in theirs)

    def surroundings(self) -> Iterator[tuple[Distance, int]]:
        """Yields what is around it, near to far; the nearest entry that two share is their distance."""
        yield Distance.RANK, self.rank
        if self.device is not None:
            yield Distance.DEVICE, self.device
        yield Distance.NODE, self.node
        yield Distance.NETWORK, 0


@collector_paused()
def plan(sources: Sequence[Holder], destinations: Sequence[Holder], bucket_bytes: int) -> TransferPlan:
    """Plans that every element of every destination is written exactly once.

    The nearest holder of a region sends it (same rank, same device, same node, other); among
    equally near ones, one that already sends to the bucket, then the one with the fewest bytes to
    send so far at that distance. So the loads of replicas that are equally near to every
    destination differ by one message at most. Destination replicas begin with different buckets, to
    spread the load. The result does not depend on the order of the holders.

    Args:
        bucket_bytes: size up to which parameters are grouped, in load order; larger ones are split.

    Raises:
        ValueError: no source holds some region of a destination, and the first one is named; a rank
            occurs twice on one side; or a bucket cannot hold one element.
    """
    source_replicas = _replicas(sources)
    destination_replicas = _replicas(destinations)
    index = SourceIndex([replicas[0].map for replicas in source_replicas])
    chooser = _SenderChooser(source_replicas, index.owners)
    waiting: dict[int, tuple[Holder, list[Bucket], list[list[Route]]]] = {}
    for replicas in destination_replicas:
        shard_map = replicas[0].map
        buckets = list(_buckets(shard_map, bucket_bytes))
        routes: list[list[Route]] = []
        for group in index.routes(shard_map, buckets):
            routes.append(sorted(group, key=lambda route: -route.nbytes))
        for i, holder in enumerate(replicas):
            # Replicas are spread over the buckets that begin a parameter.
            first = i * len(buckets) // len(replicas)
            while first and not buckets[first - 1].last:
                first -= 1
            waiting[holder.rank] = holder, buckets[first:] + buckets[:first], routes[first:] + routes[:first]
    receivers = {rank: chooser.receiver(*waiting[rank]) for rank in sorted(waiting)}
    sides = [_identity(sources), _identity(destinations)]
    fingerprint = hashlib.sha256(repr((sides, bucket_bytes)).encode()).hexdigest()
    return _assemble(fingerprint, sources, receivers)


def _identity(holders: Sequence[Holder]) -> list[tuple[int, int, str, str]]:
    return sorted((h.rank, h.node, str(h.device), h.map.fingerprint) for h in holders)


def _replicas(holders: Sequence[Holder]) -> list[list[Holder]]:
    """Groups holders by equal maps, in order of their ranks."""
    ordered = sorted(holders, key=lambda holder: holder.rank)
    repeated = {a.rank for a, b in pairwise(ordered) if a.rank == b.rank}
    if repeated:
        raise ValueError(f"ranks {sorted(repeated)} occur more than once on one side of the plan")
    groups: dict[str, list[Holder]] = defaultdict(list)
    for holder in ordered:
        groups[holder.map.fingerprint].append(holder)
    return list(groups.values())


def _buckets(shard_map: ShardMap, bucket_bytes: int) -> Iterator[Bucket]:
    """Groups small parameters; a parameter larger than a bucket has separate buckets."""
    params: list[str] = []
    nbytes = 0
    for param, info in shard_map.params.items():
        if params and nbytes + info.nbytes > bucket_bytes:
            yield Bucket(params=tuple(params), nbytes=nbytes)
            params = []
            nbytes = 0
        if info.nbytes > bucket_bytes:
            yield from _parts(param, info, bucket_bytes)
        else:
            params.append(param)
            nbytes += info.nbytes
    if params:
        yield Bucket(params=tuple(params), nbytes=nbytes)


def _parts(param: str, info: TensorInfo, bucket_bytes: int) -> Iterator[Bucket]:
    item = ITEM_BYTES[info.dtype]
    if bucket_bytes < item:
        raise ValueError(f"buckets of {bucket_bytes} bytes do not hold an element of {param}, which has {item}")
    for box in Box.whole(info.shape).split(bucket_bytes // item):
        yield Bucket(params=(param,), nbytes=box.size * item, box=box, last=box.stop == info.shape)


class _SenderChooser:
    """Chooses the senders of each destination by the load of every source so far."""

    def __init__(self, sources: Sequence[Sequence[Holder]], owners: Sequence[Owners]) -> None:
        # By index of owners: how each of their ranks stores a region, and the ranks around a place.
        self._way_of: list[dict[int, int]] = []
        self._around: list[dict[tuple[Distance, int], list[int]]] = []
        for group in owners:
            way_of: dict[int, int] = {}
            candidates: list[Holder] = []
            for way, maps in enumerate(group):
                for i in maps:
                    candidates += sources[i]
                    way_of.update((holder.rank, way) for holder in sources[i])
            around: dict[tuple[Distance, int], list[int]] = defaultdict(list)
            for holder in sorted(candidates, key=attrgetter("rank")):
                for where in holder.surroundings():
                    around[where].append(holder.rank)
            self._way_of.append(way_of)
            self._around.append(around)
        self._load: dict[Distance, dict[int, int]] = {}
        for distance in Distance:
            self._load[distance] = defaultdict(int)
        self._payload = cache(_payload)  # replicas receive the same

    def receiver(self, holder: Holder, buckets: Sequence[Bucket], routes: Sequence[Sequence[Route]]) -> ReceiverPlan:
        """Returns a destination's plan, from its buckets and the routes of each, the largest first."""
        params: dict[str, TensorInfo] = {}
        for bucket in buckets:
            if bucket.last:
                params.update((param, holder.map.params[param]) for param in bucket.params)
        return ReceiverPlan(
            rank=holder.rank,
            params=params,
            padded=frozenset(param for param, _ in holder.map.padding),
            buckets=tuple(buckets),
            messages=self._messages(holder, routes),
        )

    def _messages(self, receiver: Holder, routes: Sequence[Sequence[Route]]) -> tuple[tuple[Message, ...], ...]:
        """Returns the messages that a destination receives, by bucket, in order of their senders."""

        @cache
        def nearest(owners: int) -> tuple[dict[int, int], list[int]]:
            around = self._around[owners]
            where = next(where for where in receiver.surroundings() if where in around)
            return self._load[where[0]], around[where]

        messages: list[tuple[Message, ...]] = []
        for bucket, group in enumerate(routes):
            chosen: dict[int, list[tuple[Route, int]]] = {}
            for route in group:
                load, ranks = nearest(route.owners)
                sending = chosen and [rank for rank in ranks if rank in chosen]
                sender = min(sending or ranks, key=load.__getitem__)
                chosen.setdefault(sender, []).append((route, self._way_of[route.owners][sender]))
                load[sender] += route.nbytes
            bucket_messages: list[Message] = []
            for sender in sorted(chosen):
                copies, nbytes = self._payload(tuple(chosen[sender]))
                bucket_messages.append(Message(sender, receiver.rank, bucket, copies, nbytes))
            messages.append(tuple(bucket_messages))
        return tuple(messages)


def _payload(picks: tuple[tuple[Route, int], ...]) -> tuple[tuple[Copy, ...], int]:
    """Joins the copies of routes, larger dtypes first, so that each is aligned to its items."""
    copies = [copy for route, way in picks for copy in route.copies[way]]
    copies.sort(key=lambda copy: -ITEM_BYTES[copy.dtype])
    return tuple(copies), sum(route.nbytes for route, _ in picks)


def _assemble(fingerprint: str, sources: Sequence[Holder], receivers: Mapping[int, ReceiverPlan]) -> TransferPlan:
    """Collects every sender's messages in order of bucket and receiver."""
    outgoing: dict[int, list[Message]] = defaultdict(list)
    staging = 0
    for receiver in receivers.values():
        staging = max([staging, *(bucket.nbytes for bucket in receiver.buckets)])
        for messages in receiver.messages:
            for message in messages:
                outgoing[message.sender].append(message)
    senders: dict[int, SenderPlan] = {}
    for source in sorted(sources, key=attrgetter("rank")):
        if source.rank in outgoing:
            # They are in order of their receivers already.
            messages = tuple(sorted(outgoing[source.rank], key=attrgetter("bucket")))
            senders[source.rank] = SenderPlan(rank=source.rank, params=source.map.params, messages=messages)
    return TransferPlan(fingerprint=fingerprint, senders=senders, receivers=receivers, staging_bytes=staging)
