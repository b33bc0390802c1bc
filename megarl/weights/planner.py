"""The planner: which rank sends which elements to which.

Holders with equal shard maps are replicas. Maps are matched once per distinct destination map; replicas differ only in
their senders and in the order of their buckets.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

from megarl.garbage_collection import collector_paused
from megarl.weights.plan import Bucket, Copy, Message, ReceiverPlan, SenderPlan, TransferPlan
from megarl.weights.shard_map import ITEM_BYTES, Box, ShardMap, TensorInfo
from megarl.weights.source_index import Owners, Route, SourceIndex
from megarl.weights.topology import Distance


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A process, or a set of files, that holds weights.

    Args:
        rank: a source and a destination of one rank are the same process.
        map: replicas should share one object, which saves comparisons.
        device: numbered over all nodes; None where the process has none.
    """

    rank: int
    map: ShardMap
    node: int = 0
    device: int | None = None

    def distance(self, other: Holder) -> Distance:
        theirs = set(other.surroundings())
        return next(where[0] for where in self.surroundings() if where in theirs)

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

    The nearest holder of a region sends it (same rank, same device, same node, other); among equally near ones, one
    that already sends to the bucket, then the one with the fewest bytes to send so far at that distance. So the loads
    of replicas that are equally near to every destination differ by one message at most. Destination replicas begin
    with different buckets, to spread the load. The result does not depend on the order of the holders.

    Args:
        bucket_bytes: parameters are grouped, in load order, up to this size, and larger ones are split.

    Raises:
        PlanError: no source holds some region of a destination; the first of each tensor is named.
        ValueError: a rank occurs twice on one side, or a bucket cannot hold one element.
    """
    source_replicas = _replicas(sources)
    destination_replicas = _replicas(destinations)
    index = SourceIndex([replicas[0].map for replicas in source_replicas])
    chooser = _SenderChooser(source_replicas, index.owners)
    waiting: list[tuple[Holder, int, list[Bucket], list[list[Route]]]] = []
    for replicas in destination_replicas:
        buckets = list(_buckets(replicas[0].map, bucket_bytes))
        routes = [sorted(group, key=lambda route: -route.nbytes) for group in index.routes(replicas[0].map, buckets)]
        for i, holder in enumerate(replicas):
            # Replicas are spread over the buckets that begin a parameter.
            first = i * len(buckets) // len(replicas)
            while first and not buckets[first - 1].last:
                first -= 1
            waiting.append((holder, first, buckets, routes))
    waiting.sort(key=lambda entry: entry[0].rank)
    receivers = {
        holder.rank: chooser.receiver(holder, buckets[first:] + buckets[:first], routes[first:] + routes[:first])
        for holder, first, buckets, routes in waiting
    }
    sides = [sorted((h.rank, h.node, str(h.device), h.map.fingerprint) for h in s) for s in (sources, destinations)]
    fingerprint = hashlib.sha256(repr((sides, bucket_bytes)).encode()).hexdigest()
    return _assemble(fingerprint, {holder.rank: holder.map for holder in sources}, receivers)


def _replicas(holders: Sequence[Holder]) -> list[list[Holder]]:
    """Groups holders by equal maps, in order of their ranks."""
    ordered = sorted(holders, key=lambda holder: holder.rank)
    repeated = {a.rank for a, b in pairwise(ordered) if a.rank == b.rank}
    if repeated:
        raise ValueError(f"ranks {sorted(repeated)} occur more than once on one side of the plan")
    groups: dict[str, list[Holder]] = {}
    for holder in ordered:
        groups.setdefault(holder.map.fingerprint, []).append(holder)
    return list(groups.values())


def _buckets(shard_map: ShardMap, bucket_bytes: int) -> Iterator[Bucket]:
    """Groups small parameters; a parameter larger than a bucket gets buckets of its own."""
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
    *rest, last = Box.whole(info.shape).split(bucket_bytes // item)
    for box in rest:
        yield Bucket(params=(param,), nbytes=box.size * item, box=box, last=False)
    yield Bucket(params=(param,), nbytes=last.size * item, box=last)


class _Candidates:
    """The ranks that can send a route, with the way in which each stores its elements."""

    def __init__(self, ways: Sequence[Sequence[Holder]]) -> None:
        self.way = {holder.rank: way for way, holders in enumerate(ways) for holder in holders}
        self._around: dict[tuple[Distance, int], list[int]] = defaultdict(list)
        for holder in sorted((holder for holders in ways for holder in holders), key=attrgetter("rank")):
            for where in holder.surroundings():
                self._around[where].append(holder.rank)

    def nearest(self, receiver: Holder) -> tuple[Distance, list[int]]:
        """Returns the distance and the ranks of the nearest candidates."""
        where = next(where for where in receiver.surroundings() if where in self._around)
        return where[0], self._around[where]


class _SenderChooser:
    """Chooses the senders of each destination by the load of every source so far."""

    def __init__(self, sources: Sequence[Sequence[Holder]], owners: Sequence[Owners]) -> None:
        ways = ([[holder for i in way for holder in sources[i]] for way in group] for group in owners)
        self._candidates = [_Candidates(way) for way in ways]
        self._load: dict[Distance, dict[int, int]] = {
            distance: {holder.rank: 0 for replicas in sources for holder in replicas} for distance in Distance
        }
        self._payloads: dict[tuple[tuple[Route, int], ...], tuple[tuple[Copy, ...], int]] = {}

    def receiver(self, holder: Holder, buckets: Sequence[Bucket], routes: Sequence[Sequence[Route]]) -> ReceiverPlan:
        """Returns a destination's plan, from its buckets and the routes of each, the largest first."""
        order = [param for bucket in buckets if bucket.last for param in bucket.params]
        return ReceiverPlan(
            rank=holder.rank,
            params={param: holder.map.params[param] for param in order},
            padded=frozenset(padding.param for padding in holder.map.padding),
            buckets=tuple(buckets),
            messages=self._messages(holder, routes),
        )

    def _messages(self, receiver: Holder, routes: Sequence[Sequence[Route]]) -> tuple[tuple[Message, ...], ...]:
        """Returns the messages that a destination receives, by bucket, in order of their senders."""
        known: dict[int, tuple[Mapping[int, int], dict[int, int], list[int]]] = {}
        messages: list[tuple[Message, ...]] = []
        for bucket, group in enumerate(routes):
            chosen: dict[int, list[tuple[Route, int]]] = {}
            for route in group:
                found = known.get(route.owners)
                if found is None:
                    candidates = self._candidates[route.owners]
                    distance, nearest = candidates.nearest(receiver)
                    found = known[route.owners] = candidates.way, self._load[distance], nearest
                way, load, nearest = found
                sender = min((chosen and [rank for rank in nearest if rank in chosen]) or nearest, key=load.__getitem__)
                chosen.setdefault(sender, []).append((route, way[sender]))
                load[sender] += route.nbytes
            messages.append(tuple(self._message(s, receiver.rank, bucket, chosen[s]) for s in sorted(chosen)))
        return tuple(messages)

    def _message(self, sender: int, receiver: int, bucket: int, picks: list[tuple[Route, int]]) -> Message:
        """Joins the copies of some routes, larger dtypes first, so that each is aligned to its items."""
        key = tuple(picks)
        if key not in self._payloads:
            copies = [copy for route, way in picks for copy in route.copies[way]]
            copies.sort(key=lambda copy: -ITEM_BYTES[copy.dtype])
            self._payloads[key] = tuple(copies), sum(route.nbytes for route, _ in picks)
        copies, nbytes = self._payloads[key]
        return Message(sender=sender, receiver=receiver, bucket=bucket, copies=copies, nbytes=nbytes)


def _assemble(
    fingerprint: str, shard_maps: Mapping[int, ShardMap], receivers: Mapping[int, ReceiverPlan]
) -> TransferPlan:
    """Collects every sender's messages in order of bucket and receiver."""
    outgoing: dict[int, list[Message]] = defaultdict(list)
    for receiver in receivers.values():
        for messages in receiver.messages:
            for message in messages:
                outgoing[message.sender].append(message)
    buckets = {id(bucket): bucket.nbytes for receiver in receivers.values() for bucket in receiver.buckets}
    staging = max(buckets.values(), default=0)
    senders: dict[int, SenderPlan] = {}
    for rank in sorted(outgoing):
        messages = tuple(sorted(outgoing[rank], key=attrgetter("bucket")))  # of each bucket, by receiver already
        senders[rank] = SenderPlan(rank=rank, params=shard_maps[rank].params, messages=messages)
    return TransferPlan(fingerprint=fingerprint, senders=senders, receivers=receivers, staging_bytes=staging)
