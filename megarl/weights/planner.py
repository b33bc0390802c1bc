"""The planner: which rank sends which elements to which.

Holders with equal shard maps are replicas. Maps are matched once per distinct destination map; replicas differ in their
senders and the order of their buckets alone.
"""

from __future__ import annotations

import gc
import hashlib
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

from megarl.weights.plan import Bucket, Copy, Message, ReceiverPlan, SenderPlan, TransferPlan
from megarl.weights.shard_map import ITEM_BYTES, Box, ShardMap, TensorInfo
from megarl.weights.source_index import Owners, Route, SourceIndex
from megarl.weights.topology import Distance, Place


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A process, or a set of files, that holds weights.

    Args:
        rank: a source and a destination of one rank are the same process.
        map: replicas should share one object, which saves comparisons.
        device: numbered over all nodes; None where there is none.
    """

    rank: int
    map: ShardMap
    node: int = 0
    device: int | None = None

    def distance(self, other: Holder) -> Distance:
        theirs = set(other.surroundings())
        return next(where[0] for where in self.surroundings() if where in theirs)

    def surroundings(self) -> Iterator[tuple[Distance, int]]:
        """Yields what is around it, near to far."""
        yield Distance.RANK, self.rank
        yield from Place(node=self.node, device=self.device).surroundings()


@dataclass(frozen=True)
class _Replicas:
    """Holders with equal maps, by rank."""

    map: ShardMap
    holders: list[Holder]


@dataclass(frozen=True)
class _Template:
    """What all replicas of a destination receive: buckets, and the routes of each, the largest first."""

    map: ShardMap
    buckets: tuple[Bucket, ...]
    routes: tuple[tuple[Route, ...], ...]

    def first(self, replica: int, replicas: int) -> int:
        """Returns the first bucket of a replica; replicas are spread over the buckets that begin with a parameter."""
        first = replica * len(self.buckets) // replicas
        while first and not self.buckets[first - 1].last:
            first -= 1
        return first


@contextmanager
def collector_paused() -> Generator[None]:
    """Pauses the garbage collector, which would scan the many objects of a plan repeatedly."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@collector_paused()
def plan(sources: Sequence[Holder], destinations: Sequence[Holder], bucket_bytes: int) -> TransferPlan:
    """Plans that every element of every destination is written exactly once.

    The nearest holder of a region sends it (same rank, same device, same node, other); among those one that already
    sends to the bucket, then the one with the fewest bytes to send so far at that distance. So replicas that are
    equally near to every destination differ by one message at most. Destination replicas begin with different buckets,
    to spread the load.

    The result does not depend on the order of the holders.

    Args:
        sources, destinations: ranks are unique on each side.
        bucket_bytes: parameters are grouped, in load order, up to this size, and larger ones are split; at least one
            element.

    Raises:
        PlanError: no source holds some region of a destination; the first of each tensor is named.
        ValueError: a rank occurs twice on one side, or a bucket cannot hold one element.
    """
    source_replicas, destination_replicas = _replicas(sources), _replicas(destinations)
    matched = SourceIndex([replicas.map for replicas in source_replicas])
    stamper = _Stamper(source_replicas, matched.owners)
    stamps: list[tuple[Holder, _Template, int]] = []
    for replicas in destination_replicas:
        template = _template(replicas.map, matched, bucket_bytes)
        count = len(replicas.holders)
        stamps += [(holder, template, template.first(i, count)) for i, holder in enumerate(replicas.holders)]
    stamps.sort(key=lambda stamp: stamp[0].rank)
    receivers = {holder.rank: stamper.receiver(holder, template, first) for holder, template, first in stamps}
    fingerprint = _fingerprint(sources, destinations, bucket_bytes)
    return _assemble(fingerprint, {holder.rank: holder.map for holder in sources}, receivers)


def _replicas(holders: Sequence[Holder]) -> list[_Replicas]:
    """Groups holders by equal maps, in order of their first rank."""
    ordered = sorted(holders, key=lambda holder: holder.rank)
    repeated = {a.rank for a, b in pairwise(ordered) if a.rank == b.rank}
    if repeated:
        raise ValueError(f"ranks {sorted(repeated)} occur more than once on one side of the plan")
    groups: dict[str, _Replicas] = {}
    for holder in ordered:
        groups.setdefault(holder.map.fingerprint, _Replicas(holder.map, [])).holders.append(holder)
    return list(groups.values())


def _template(shard_map: ShardMap, sources: SourceIndex, bucket_bytes: int) -> _Template:
    buckets = tuple(_buckets(shard_map, bucket_bytes))
    routes = sources.routes(shard_map, buckets)
    return _Template(
        shard_map, buckets, tuple(tuple(sorted(group, key=lambda route: -route.nbytes)) for group in routes)
    )


def _buckets(shard_map: ShardMap, bucket_bytes: int) -> Iterator[Bucket]:
    """Groups small parameters; a parameter larger than a bucket gets buckets of its own."""
    params: list[str] = []
    nbytes = 0
    for param, info in shard_map.params.items():
        if params and nbytes + info.nbytes > bucket_bytes:
            yield Bucket(params=tuple(params), nbytes=nbytes)
            params, nbytes = [], 0
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
    """The ranks that can send a route; ``ways`` has the holders by the way they store its elements."""

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


class _Stamper:
    """Chooses the senders of each destination by the load of every source so far."""

    def __init__(self, sources: Sequence[_Replicas], owners: Sequence[Owners]) -> None:
        ways = ([[holder for i in way for holder in sources[i].holders] for way in group] for group in owners)
        self._candidates = [_Candidates(way) for way in ways]
        self._load: dict[Distance, dict[int, int]] = {
            distance: {holder.rank: 0 for replicas in sources for holder in replicas.holders} for distance in Distance
        }
        self._payloads: dict[tuple[tuple[Route, int], ...], tuple[tuple[Copy, ...], int]] = {}

    def receiver(self, holder: Holder, template: _Template, first: int) -> ReceiverPlan:
        """Returns a destination's plan, beginning with bucket ``first`` of the template."""
        buckets = (*template.buckets[first:], *template.buckets[:first])
        routes = (*template.routes[first:], *template.routes[:first])
        order = [param for bucket in buckets if bucket.last for param in bucket.params]
        return ReceiverPlan(
            rank=holder.rank,
            params={param: holder.map.params[param] for param in order},
            padded=frozenset(padding.param for padding in holder.map.padding),
            buckets=buckets,
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
    senders = {
        rank: SenderPlan(
            rank=rank,
            params=shard_maps[rank].params,
            messages=tuple(sorted(outgoing[rank], key=attrgetter("bucket"))),  # of each bucket, by receiver already
        )
        for rank in sorted(outgoing)
    }
    return TransferPlan(fingerprint=fingerprint, senders=senders, receivers=receivers, staging_bytes=staging)


def _fingerprint(sources: Sequence[Holder], destinations: Sequence[Holder], bucket_bytes: int) -> str:
    """Digest of everything that the plan depends on."""
    sides = [
        sorted((h.rank, h.node, str(h.device), h.map.fingerprint) for h in side) for side in (sources, destinations)
    ]
    return hashlib.sha256(repr((sides, bucket_bytes)).encode()).hexdigest()
