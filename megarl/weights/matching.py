"""What a destination needs against what the sources hold: which copies bring it, and who could send them."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from megarl.weights.plans import Bucket, Copy
from megarl.weights.regions import Box, Piece, ShardMap, adjacent_axis

_NAMED = 10
"""Tensors that a refusal names."""


class PlanError(ValueError):
    """The sources do not hold what a destination needs; the message names tensor and region."""


Owners = tuple[tuple[int, ...], ...]
"""Indices of source maps, those together that store a region alike."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """A canonical box, the different ways in which it is stored, and the maps that store it so."""

    region: Box
    pieces: tuple[Piece, ...]
    owners: Owners


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """Copies for one bucket that the same source maps can send.

    Args:
        owners: the maps, by the way in which they store what is copied.
        copies: for each way, the copies from there.
        nbytes: of all copies from one owner.
    """

    owners: Owners
    copies: tuple[tuple[Copy, ...], ...]
    nbytes: int


class Sources:
    """What some shard maps hold together.

    Args:
        maps: different ones; owners are indices of them.
    """

    def __init__(self, maps: Sequence[ShardMap]) -> None:
        found: dict[str, dict[Box, dict[tuple[str, Box, bool], tuple[Piece, list[int]]]]] = defaultdict(dict)
        for index, shard in enumerate(maps):
            for piece in shard.pieces:
                ways = found[piece.name].setdefault(piece.region, {})
                _, owners = ways.setdefault((piece.param, piece.box, piece.transposed), (piece, []))
                owners.append(index)
        known: dict[Owners, Owners] = {}
        self._stored: dict[str, list[_Stored]] = defaultdict(list)
        for name, regions in found.items():
            for region in sorted(regions):
                ways = list(regions[region].values())
                owners = tuple(tuple(maps) for _, maps in ways)
                pieces = tuple(piece for piece, _ in ways)
                self._stored[name].append(_Stored(region, pieces, known.setdefault(owners, owners)))

    def routes(self, shard: ShardMap, buckets: Sequence[Bucket]) -> list[tuple[Route, ...]]:
        """The copies that fill a destination's parameters, per bucket.

        Args:
            shard: what the destination holds.
            buckets: of its parameters.

        Raises:
            PlanError: nobody holds some region; the first of each tensor is named.
        """
        pieces: dict[str, list[Piece]] = {param: [] for param in shard.params}
        for piece in shard.pieces:
            pieces[piece.param].append(piece)
        missing: dict[str, str] = {}
        routes: list[tuple[Route, ...]] = []
        for bucket in buckets:
            found: dict[Owners, list[list[Copy]]] = {}
            for param in bucket.params:
                dtype = shard.params[param].dtype
                for piece in _inside(pieces[param], bucket.box):
                    for region, source in self._cover(piece, missing):
                        ways = found.get(source.owners)
                        if ways is None:
                            ways = found[source.owners] = [[] for _ in source.owners]
                        for copies, held in zip(ways, source.pieces, strict=True):
                            _append(copies, _copy(held, piece, region, dtype))
            routes.append(tuple(_route(owners, ways) for owners, ways in found.items()))
        if missing:
            named = "; ".join(list(missing.values())[:_NAMED])
            more = f"; and {len(missing) - _NAMED} more tensors" if len(missing) > _NAMED else ""
            raise PlanError(f"no source holds {named}{more}")
        return routes

    def _cover(self, piece: Piece, missing: dict[str, str]) -> Iterator[tuple[Box, _Stored]]:
        """Splits a destination piece's region into parts that one source box holds each."""
        stored = self._stored.get(piece.name, [])
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


def _inside(pieces: Sequence[Piece], box: Box | None) -> Iterable[Piece]:
    """The parts of a parameter's pieces in a box of it; all of them where it is None."""
    return pieces if box is None else filter(None, (piece.within(box) for piece in pieces))


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
    """Adds a copy, joined with the last ones where it continues them."""
    while copies and (joined := _joined(copies[-1], new)) is not None:
        copies.pop()
        new = joined
    copies.append(new)


def _joined(a: Copy, b: Copy) -> Copy | None:
    """One copy for two, where both sides of the second continue those of the first along the same axis."""
    if a.source != b.source or a.target != b.target or a.transposed != b.transposed:
        return None
    here, there = adjacent_axis(a.source_box, b.source_box), adjacent_axis(a.target_box, b.target_box)
    if here is None or there is None or _target_axis(b, here) != there:
        return None
    return replace(
        a,
        source_box=Box(a.source_box.start, b.source_box.stop),
        target_box=Box(a.target_box.start, b.target_box.stop),
    )


def _target_axis(copy: Copy, axis: int) -> int:
    """The axis of a copy's target box that corresponds to one of its source box."""
    last = axis - len(copy.source_box.start)  # the axes correspond from the last one on
    exchanged = {-1: -2, -2: -1}.get(last, last) if copy.transposed else last
    return exchanged + len(copy.target_box.start)


def _route(owners: Owners, ways: list[list[Copy]]) -> Route:
    return Route(owners, tuple(map(tuple, ways)), sum(copy.nbytes for copy in ways[0]))
