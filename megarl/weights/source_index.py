"""Matches what a destination needs with what the sources hold: the copies, and who can send them."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from megarl.weights.plan import Bucket, Copy
from megarl.weights.shard_map import ITEM_BYTES, Box, Shard, ShardMap, adjacent_axis

Owners = tuple[tuple[int, ...], ...]
"""Indices of the source maps that store a region, grouped by how they store it."""


_Cover = tuple[list[tuple[Box, int, int]], Box | None]
"""A region in parts, each with its size and the index of a box that holds it; and a part that none holds."""


@dataclass(slots=True, eq=False)
class Route:
    """Copies for one bucket that the same source maps can send; equal to no other.

    Args:
        owners: index in ``SourceIndex.owners``.
        copies: copies by way of storage.
        nbytes: size of the copies from one owner.
    """

    owners: int
    copies: list[list[Copy]]
    nbytes: int = 0


class SourceIndex:
    """An index of what distinct shard maps hold together."""

    def __init__(self, maps: Sequence[ShardMap]) -> None:
        found: dict[str, dict[Box, dict[Shard, list[int]]]] = defaultdict(lambda: defaultdict(dict))
        for index, shard_map in enumerate(maps):
            for shard in shard_map.shards:
                owners = found[shard.name][shard.region].setdefault(shard, [])
                owners.append(index)
        known: dict[Owners, int] = {}
        # By tensor, the distinct boxes that sources hold, in order; for each, the shards, and an
        # index of the owners.
        self._held: dict[str, tuple[tuple[Box, ...], list[tuple[tuple[Shard, ...], int]]]] = {}
        for name, regions in found.items():
            boxes = tuple(sorted(regions))
            ways: list[tuple[tuple[Shard, ...], int]] = []
            for box in boxes:
                owners = tuple(map(tuple, regions[box].values()))
                ways.append((tuple(regions[box]), known.setdefault(owners, len(known))))
            self._held[name] = boxes, ways
        self.owners = list(known)
        # Layers and experts differ in their names alone: results for their boxes are kept.
        self._cover = cache(_cover)
        self._local_box = cache(_local_box)

    def routes(self, shard_map: ShardMap, buckets: Sequence[Bucket]) -> list[tuple[Route, ...]]:
        """Returns the copies that fill a destination's parameters, by bucket."""
        shards: dict[str, list[Shard]] = {param: [] for param in shard_map.params}
        for shard in shard_map.shards:
            shards[shard.param].append(shard)
        missing: dict[str, str] = {}
        routes: list[tuple[Route, ...]] = []
        for bucket in buckets:
            found: dict[int, Route] = {}
            for param in bucket.params:
                for shard in _inside(shards[param], bucket.box):
                    self._add(shard, shard_map.params[param].dtype, found, missing)
            routes.append(tuple(found.values()))
        if missing:
            first, *more = missing.values()
            others = f"; and {len(more)} more tensors" if more else ""
            raise ValueError(f"no source holds {first}{others}")
        return routes

    def _add(self, shard: Shard, dtype: str, routes: dict[int, Route], missing: dict[str, str]) -> None:
        boxes, ways = self._held.get(shard.name, ((), []))
        parts, uncovered = self._cover(shard.region, boxes)
        for region, size, i in parts:
            held, owners = ways[i]
            route = routes.get(owners)
            if route is None:
                route = routes[owners] = Route(owners, [[] for _ in held])
            route.nbytes += size * ITEM_BYTES[dtype]
            target = self._local_box(shard.box, shard.region, shard.transposed, region)
            for copies, source in zip(route.copies, held, strict=True):
                box = self._local_box(source.box, source.region, source.transposed, region)
                transposed = source.transposed != shard.transposed
                _append(copies, Copy(source.param, box, shard.param, target, dtype, transposed))
        if uncovered is not None:
            missing.setdefault(shard.name, f"{shard.name}{uncovered}, which {shard.param} needs")


def _local_box(box: Box, whole: Box, transposed: bool, region: Box) -> Box:
    return Shard("", box, "", whole, transposed).local(region)


def _cover(region: Box, stored: tuple[Box, ...]) -> _Cover:
    """Splits a region into parts that one of the ordered boxes holds each."""
    parts: list[tuple[Box, int, int]] = []
    open_boxes = [region]
    stop = bisect_left(stored, region.stop[0], key=lambda box: box.start[0])
    for i, source in enumerate(stored[:stop]):
        still_open: list[Box] = []
        for box in open_boxes:
            part = box.intersect(source)
            if part is not None:
                parts.append((part, part.size, i))
            still_open += box.without(source)
        open_boxes = still_open
        if not open_boxes:
            break
    if open_boxes:
        return parts, open_boxes[0]
    return parts, None


def _inside(shards: Sequence[Shard], box: Box | None) -> Iterable[Shard]:
    """Returns the parts of a parameter's shards in a box of it, or all of them for None."""
    if box is None:
        return shards
    parts: list[Shard] = []
    for shard in shards:
        if shard.box.start[0] < box.stop[0] and box.start[0] < shard.box.stop[0]:
            part = shard.within(box)
            if part is not None:
                parts.append(part)
    return parts


def _append(copies: list[Copy], new: Copy) -> None:
    """Appends a copy, joined with the last ones where it continues them."""
    while copies and (joined := _joined(copies[-1], new)) is not None:
        copies.pop()
        new = joined
    copies.append(new)


def _joined(a: Copy, b: Copy) -> Copy | None:
    """Returns one copy for two where the second continues the first along one axis on both sides."""
    if a.source != b.source or a.target != b.target or a.transposed != b.transposed:
        return None
    here = adjacent_axis(a.source_box, b.source_box)
    there = adjacent_axis(a.target_box, b.target_box)
    if here is None or there is None:
        return None
    axis = here - len(b.source_box.start)  # the axes of the boxes correspond from the last one on
    if b.transposed and axis >= -2:
        axis = -3 - axis
    if axis + len(b.target_box.start) != there:
        return None
    source = Box(a.source_box.start, b.source_box.stop)
    target = Box(a.target_box.start, b.target_box.stop)
    return a._replace(source_box=source, target_box=target)
