"""Files as holders: chunks as parameters of their own, and what to read for each block that is written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from operator import sub

import torch

from megarl.convert.stored import BoxReader, Stored
from megarl.weights.hf_files import FILES_RANK
from megarl.weights.plan import Bucket, Copy
from megarl.weights.planner import Holder, plan
from megarl.weights.shard_map import ITEM_BYTES, Box, Hole, Piece, Shape, ShardMap, TensorInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Slab:
    """A box of a whole parameter that is stored by itself.

    Args:
        param: the whole one.
        box: in it.
        dtype: of the stored elements.
    """

    param: str
    box: Box
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A part of a target that is in memory at one time.

    Args:
        target: name of what is written.
        box: in the target; row-major, its elements follow one another.
        dtype: of the target.
        copies: that fill the box; the rest of it is zero. Their target boxes are of the target.
    """

    target: str
    box: Box
    dtype: str
    copies: tuple[Copy, ...]

    @property
    def nbytes(self) -> int:
        return self.box.size * ITEM_BYTES[self.dtype]

    @property
    def sources(self) -> set[str]:
        """What is read."""
        return {copy.source for copy in self.copies}

    def read(self, sources: Mapping[str, Stored], reader: BoxReader) -> torch.Tensor:
        """The elements of the box.

        Raises:
            BrokenError: a file is not what it should be.
            UsageError: a finite value does not fit the dtype.
        """
        values = torch.zeros(self.box.shape, dtype=getattr(torch, self.dtype))
        for copy in self.copies:
            inside = _moved(copy.target_box, self.box.start)
            reader.copy(sources[copy.source], copy, values[inside.slices])
        return values


def chunk_map(whole: ShardMap, slabs: Mapping[str, Slab]) -> ShardMap:
    """The map of a holder that has slabs of parameters as parameters of their own; outside of the whole are holes.

    Args:
        whole: what all slabs are parts of.
        slabs: by the names that they get.
    """
    index = _Index(whole)
    pieces: list[Piece] = []
    holes: list[Hole] = []
    for name, slab in slabs.items():
        open_boxes = [slab.box]
        for piece in index.pieces(slab):
            part = piece.within(slab.box)
            if part is not None:
                box = _moved(part.box, slab.box.start)
                pieces.append(
                    Piece(param=name, box=box, name=part.name, region=part.region, transposed=part.transposed)
                )
                open_boxes = [rest for box in open_boxes for rest in _without(box, part.box)]
        holes += [Hole(param=name, box=_moved(box, slab.box.start)) for box in open_boxes]
    params = {name: TensorInfo(slab.box.shape, slab.dtype) for name, slab in slabs.items()}
    return ShardMap(params=params, pieces=tuple(pieces), holes=tuple(holes))


def blocks(source: ShardMap, target: ShardMap, block_bytes: int) -> Iterator[Block]:
    """What to copy from one set of files to another, one block of each target after the other.

    Raises:
        PlanError: the source lacks a region; the first of each tensor is named.
    """
    transfer = plan([Holder(rank=FILES_RANK, map=source)], [Holder(rank=0, map=target)], block_bytes)
    receiver = transfer.receivers[0]
    for bucket, messages in zip(receiver.buckets, receiver.messages, strict=True):
        yield from _bucket_blocks(bucket, [copy for message in messages for copy in message.copies], target)


def _bucket_blocks(bucket: Bucket, copies: Sequence[Copy], target: ShardMap) -> Iterator[Block]:
    per_param: dict[str, list[Copy]] = {param: [] for param in bucket.params}
    for copy in copies:
        per_param[copy.target].append(copy)
    for param, own in per_param.items():
        info = target.params[param]
        yield Block(target=param, box=bucket.box or Box.whole(info.shape), dtype=info.dtype, copies=tuple(own))


class _Index:
    """The pieces of a map by parameter and, where parameters stack matrices along leading axes, by those indices."""

    def __init__(self, whole: ShardMap) -> None:
        self._leading: dict[str, int] = {}
        self._pieces: dict[tuple[str, Shape], list[Piece]] = defaultdict(list)
        for piece in whole.pieces:
            leading = len(piece.box.start) - len(piece.region.start)
            self._leading[piece.param] = leading
            self._pieces[piece.param, piece.box.start[:leading]].append(piece)

    def pieces(self, slab: Slab) -> Iterator[Piece]:
        """Those that may reach into a slab."""
        leading = self._leading.get(slab.param, 0)
        for at in product(*(range(s.start, s.stop) for s in slab.box.slices[:leading])):
            yield from self._pieces.get((slab.param, at), ())


def _moved(box: Box, origin: Shape) -> Box:
    """A box as seen from another origin."""
    return Box(tuple(map(sub, box.start, origin)), tuple(map(sub, box.stop, origin)))


def _without(box: Box, hole: Box) -> list[Box]:
    inside = box.intersect(hole)
    return [box] if inside is None else box.without(inside)
