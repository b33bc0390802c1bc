"""The planner: who sends which elements to whom, for every way in which weights move.

Holders with equal shard maps are replicas. Maps are intersected once per distinct destination map; what follows
from that is stamped onto its replicas, for which only the choice of senders differs.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from megarl.weights.plans import Bucket, Copy, Message, ReceiverPlan, SenderPlan, TransferPlan
from megarl.weights.regions import ITEM_BYTES, Box, Piece, ShardMap, TensorInfo, adjacent_axis


class PlanError(ValueError):
    """The sources do not hold what a destination needs; the message names tensor and region."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A process, or a set of files, that holds weights.

    Args:
        rank: the process; a source and a destination of the same rank are the same process.
        map: what it holds. Replicas should share one object, which saves comparing.
        node: the machine that it is on; senders on the receiver's own are preferred.
    """

    rank: int
    map: ShardMap
    node: int = 0


@dataclass(frozen=True)
class _Replicas:
    """Holders with equal maps."""

    map: ShardMap
    holders: list[Holder]


@dataclass(frozen=True)
class _Stored:
    """A canonical box and the pieces that hold all of it: indices of source replicas, and the piece in their map."""

    region: Box
    owners: tuple[tuple[int, Piece], ...]


@dataclass(frozen=True)
class _Route:
    """Copies for one bucket that the same source replicas can send.

    Args:
        owners: indices of the source replicas.
        copies: for each of them, its copies.
        nbytes: of all copies of one owner.
    """

    owners: tuple[int, ...]
    copies: tuple[tuple[Copy, ...], ...]
    nbytes: int


@dataclass(frozen=True)
class _Template:
    """What all replicas of a destination receive."""

    buckets: tuple[Bucket, ...]
    routes: tuple[tuple[_Route, ...], ...]


def plan(sources: Sequence[Holder], destinations: Sequence[Holder], bucket_bytes: int) -> TransferPlan:
    """Plans that every element of every destination is written exactly once.

    Among the holders of a region the nearest sends it (same rank, same node, other), then one that sends to the same
    bucket anyway, then the one with the fewest bytes to send so far. The result depends on the arguments alone.

    Args:
        sources: who has the weights; ranks differ.
        destinations: who needs them; ranks differ.
        bucket_bytes: parameters are grouped, in load order, to at most this size, and larger ones split to it; at
            least the size of one element.

    Raises:
        PlanError: some region of a destination is held by no source; the first of each tensor is named.
        ValueError: a rank occurs twice on one side, or a bucket would not hold one element.
    """
    source_replicas, destination_replicas = _replicas(sources), _replicas(destinations)
    stored = _index(source_replicas)
    templates = [_template(replicas.map, stored, bucket_bytes) for replicas in destination_replicas]
    template_of = {
        holder.rank: (i, holder) for i, replicas in enumerate(destination_replicas) for holder in replicas.holders
    }
    stamper = _Stamper(source_replicas)
    shards = {holder.rank: holder.map for holder in sources}
    messages = {rank: stamper.messages(holder, i, templates[i]) for rank, (i, holder) in sorted(template_of.items())}
    return _assemble(_fingerprint(sources, destinations, bucket_bytes), messages, shards, templates, template_of)


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


def _index(replicas: Sequence[_Replicas]) -> dict[str, list[_Stored]]:
    """For every canonical tensor, the distinct boxes that are held, in order, each with its owners."""
    owners: dict[tuple[str, Box], list[tuple[int, Piece]]] = defaultdict(list)
    for i, group in enumerate(replicas):
        for piece in group.map.pieces:
            held = owners[piece.name, piece.region]
            if not held or held[-1][0] != i:
                held.append((i, piece))
    index: dict[str, list[_Stored]] = defaultdict(list)
    for (name, region), held in sorted(owners.items(), key=lambda item: item[0]):
        index[name].append(_Stored(region, tuple(held)))
    return index


def _template(shard: ShardMap, stored: Mapping[str, list[_Stored]], bucket_bytes: int) -> _Template:
    """Intersects one destination map with the sources."""
    pieces: dict[str, list[Piece]] = {param: [] for param in shard.params}
    for piece in shard.pieces:
        pieces[piece.param].append(piece)
    missing: dict[str, str] = {}
    buckets = tuple(_buckets(shard, bucket_bytes))
    routes: list[tuple[_Route, ...]] = []
    for bucket in buckets:
        found: dict[tuple[int, ...], list[list[Copy]]] = {}
        for param in bucket.params:
            dtype = shard.params[param].dtype
            for piece in _inside(pieces[param], bucket.box):
                for region, source in _cover(piece, stored.get(piece.name, []), missing):
                    key = tuple(i for i, _ in source.owners)
                    per_owner = found.setdefault(key, [[] for _ in key])
                    for copies, (_, held) in zip(per_owner, source.owners, strict=True):
                        _append(copies, _copy(held, piece, region, dtype))
        routes.append(tuple(_route(key, per_owner) for key, per_owner in found.items()))
    if missing:
        raise PlanError("no source holds " + "; ".join(missing.values()))
    return _Template(buckets, tuple(routes))


def _buckets(shard: ShardMap, bucket_bytes: int) -> Iterator[Bucket]:
    """Groups small parameters; a parameter that is larger than a bucket gets several of its own."""
    params: list[str] = []
    nbytes = 0
    for param, info in shard.params.items():
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


def _inside(pieces: Sequence[Piece], box: Box | None) -> Iterable[Piece]:
    """The parts of a parameter's pieces in a box of it; all of them where it is None."""
    return pieces if box is None else filter(None, (piece.within(box) for piece in pieces))


def _cover(piece: Piece, stored: list[_Stored], missing: dict[str, str]) -> Iterator[tuple[Box, _Stored]]:
    """Splits a destination piece's region into parts that one source box holds each."""
    open_boxes = [piece.region]
    stop = bisect_left(stored, piece.region.stop[0], key=lambda item: item.region.start[0])
    for source in stored[:stop]:
        still_open: list[Box] = []
        for box in open_boxes:
            part = box.intersect(source.region)
            if part is None:
                still_open.append(box)
            else:
                yield part, source
                still_open += box.without(part)
        open_boxes = still_open
        if not open_boxes:
            return
    missing.setdefault(piece.name, f"{piece.name}{open_boxes[0]}, which {piece.param} needs")


def _copy(held: Piece, needed: Piece, region: Box, dtype: str) -> Copy:
    return Copy(
        source=held.param,
        source_box=held.local(region),
        target=needed.param,
        target_box=needed.local(region),
        dtype=dtype,
        transposed=held.transposed != needed.transposed,
    )


def _append(copies: list[Copy], new: Copy) -> None:
    """Adds a copy, as a continuation of the last one where both of its sides continue that one's."""
    last = copies[-1] if copies else None
    if last and (last.source, last.target, last.transposed) == (new.source, new.target, new.transposed):
        here, there = adjacent_axis(last.source_box, new.source_box), adjacent_axis(last.target_box, new.target_box)
        if here is not None and there is not None and _target_axis(new, here) == there:
            copies[-1] = Copy(
                source=new.source,
                source_box=Box(last.source_box.start, new.source_box.stop),
                target=new.target,
                target_box=Box(last.target_box.start, new.target_box.stop),
                dtype=new.dtype,
                transposed=new.transposed,
            )
            return
    copies.append(new)


def _target_axis(copy: Copy, axis: int) -> int:
    """The axis of a copy's target box that corresponds to one of its source box."""
    last = axis - len(copy.source_box.start)  # the axes correspond from the last one on
    exchanged = {-1: -2, -2: -1}.get(last, last) if copy.transposed else last
    return exchanged + len(copy.target_box.start)


def _route(owners: tuple[int, ...], per_owner: list[list[Copy]]) -> _Route:
    nbytes = sum(copy.nbytes for copy in per_owner[0])
    return _Route(owners, tuple(tuple(copies) for copies in per_owner), nbytes)


@dataclass
class _Stamper:
    """Chooses the senders of each destination; keeps account of what every source sends.

    Args:
        sources: the source replicas.
        load: bytes that each source rank sends so far.
        payloads: the copies and bytes of messages with the same content, by destination template, bucket and routes.
    """

    sources: Sequence[_Replicas]
    load: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    payloads: dict[tuple[int, int, tuple[tuple[int, int], ...]], tuple[tuple[Copy, ...], int]] = field(
        default_factory=dict
    )

    def messages(self, receiver: Holder, index: int, template: _Template) -> tuple[tuple[Message, ...], ...]:
        """The messages that a destination receives, per bucket, in order of their senders."""
        return tuple(self._bucket(receiver, index, b, routes) for b, routes in enumerate(template.routes))

    def _bucket(self, receiver: Holder, index: int, bucket: int, routes: Sequence[_Route]) -> tuple[Message, ...]:
        chosen: dict[int, list[tuple[int, int]]] = {}
        for r in sorted(range(len(routes)), key=lambda r: -routes[r].nbytes):
            sender, owner = self._sender(receiver, routes[r], chosen)
            chosen.setdefault(sender, []).append((r, owner))
            self.load[sender] += routes[r].nbytes
        messages: list[Message] = []
        for sender, picks in sorted(chosen.items()):
            key = (index, bucket, tuple(sorted(picks)))
            if key not in self.payloads:
                self.payloads[key] = _payload(routes, key[2])
            copies, nbytes = self.payloads[key]
            messages.append(Message(sender=sender, receiver=receiver.rank, bucket=bucket, copies=copies, nbytes=nbytes))
        return tuple(messages)

    def _sender(self, receiver: Holder, route: _Route, chosen: Mapping[int, object]) -> tuple[int, int]:
        """The rank that sends a route, and the position of its replicas among the route's owners."""
        best: tuple[int, bool, int, int] | None = None
        position = 0
        for i, owner in enumerate(route.owners):
            for holder in self.sources[owner].holders:
                distance = 0 if holder.rank == receiver.rank else 1 if holder.node == receiver.node else 2
                key = (distance, holder.rank not in chosen, self.load[holder.rank], holder.rank)
                if best is None or key < best:
                    best, position = key, i
        assert best is not None, "a route has owners"
        return best[3], position


def _payload(routes: Sequence[_Route], picks: Sequence[tuple[int, int]]) -> tuple[tuple[Copy, ...], int]:
    """The copies of one message: larger dtypes first, so that each starts at a multiple of its item size."""
    copies = [copy for r, owner in picks for copy in routes[r].copies[owner]]
    copies.sort(key=lambda copy: -ITEM_BYTES[copy.dtype])
    return tuple(copies), sum(copy.nbytes for copy in copies)


def _assemble(
    fingerprint: str,
    messages: Mapping[int, tuple[tuple[Message, ...], ...]],
    shards: Mapping[int, ShardMap],
    templates: Sequence[_Template],
    template_of: Mapping[int, tuple[int, Holder]],
) -> TransferPlan:
    """Sorts the messages into one part per rank."""
    staging = max((bucket.nbytes for template in templates for bucket in template.buckets), default=0)
    outgoing: dict[int, list[Message]] = defaultdict(list)
    receivers: dict[int, ReceiverPlan] = {}
    for rank, per_bucket in messages.items():
        index, holder = template_of[rank]
        receivers[rank] = ReceiverPlan(
            rank=rank,
            fingerprint=fingerprint,
            params=holder.map.params,
            holed=frozenset(hole.param for hole in holder.map.holes),
            buckets=templates[index].buckets,
            messages=per_bucket,
        )
        for bucket in per_bucket:
            for message in bucket:
                outgoing[message.sender].append(message)
    senders = {
        rank: SenderPlan(
            rank=rank,
            fingerprint=fingerprint,
            params=shards[rank].params,
            messages=tuple(sorted(sent, key=lambda message: (message.bucket, message.receiver))),
            staging_bytes=staging,
        )
        for rank, sent in sorted(outgoing.items())
    }
    return TransferPlan(fingerprint=fingerprint, senders=senders, receivers=receivers, staging_bytes=staging)


def _fingerprint(sources: Sequence[Holder], destinations: Sequence[Holder], bucket_bytes: int) -> str:
    """A digest of everything that the plan depends on."""
    sides = [sorted((h.rank, h.node, h.map.fingerprint) for h in side) for side in (sources, destinations)]
    return hashlib.sha256(repr((sides, bucket_bytes)).encode()).hexdigest()
