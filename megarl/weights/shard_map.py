"""Boxes of canonical tensors, and shard maps, which say what each holder has; plain data without torch."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import add, ge, le, lt, sub
from typing import NamedTuple

Shape = tuple[int, ...]

ITEM_BYTES: Mapping[str, int] = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
"""The dtypes that weights may have, by torch's name without its prefix, with their size in bytes."""


class Box(NamedTuple):
    """A half-open box of element coordinates: ``start[i] <= x[i] < stop[i]`` along every axis.

    A tuple, because hashing and comparing dominate planning.
    """

    start: Shape
    stop: Shape

    @classmethod
    def whole(cls, shape: Shape) -> Box:
        return cls((0,) * len(shape), shape)

    @property
    def shape(self) -> Shape:
        return tuple(map(sub, self.stop, self.start))

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def intersect(self, other: Box) -> Box | None:
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(map(lt, start, stop)) else None

    def relative_to(self, other: Box) -> Box:
        """Returns this box in coordinates from the other one's start."""
        start = tuple(map(sub, self.start, other.start))
        return Box(start, tuple(map(sub, self.stop, other.start)))

    def contains(self, other: Box) -> bool:
        if len(self.start) != len(other.start):
            return False
        return all(map(le, self.start, other.start)) and all(map(ge, self.stop, other.stop))

    def without(self, other: Box) -> list[Box]:
        """Returns disjoint boxes that cover this box outside of another one."""
        inner = self.intersect(other)
        if inner is None:
            return [self]
        rest: list[Box] = []
        start = list(self.start)
        stop = list(self.stop)
        for axis, (low, high) in enumerate(zip(inner.start, inner.stop, strict=True)):
            if start[axis] < low:
                rest.append(Box(tuple(start), (*stop[:axis], low, *stop[axis + 1 :])))
            if high < stop[axis]:
                rest.append(Box((*start[:axis], high, *start[axis + 1 :]), tuple(stop)))
            start[axis] = low
            stop[axis] = high
        return rest

    def split(self, size: int) -> list[Box]:
        """Returns disjoint boxes of at most ``size`` (>= 1) elements that cover this box, in row-major order."""
        if self.size <= size:
            return [self]
        axis = next(i for i, extent in enumerate(self.shape) if extent > 1)
        step = max(1, size * self.shape[axis] // self.size)
        parts: list[Box] = []
        for at in range(self.start[axis], self.stop[axis], step):
            start = (*self.start[:axis], at, *self.start[axis + 1 :])
            stop = (*self.stop[:axis], min(at + step, self.stop[axis]), *self.stop[axis + 1 :])
            parts += Box(start, stop).split(size)
        return parts

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"


def adjacent_axis(a: Box, b: Box) -> int | None:
    """Returns the axis along which ``b`` continues ``a`` with the same extents elsewhere, or None."""
    differing = [i for i in range(len(a.start)) if (a.start[i], a.stop[i]) != (b.start[i], b.stop[i])]
    if len(differing) == 1 and a.stop[differing[0]] == b.start[differing[0]]:
        return differing[0]
    return None


def row_major_boxes(shape: Shape, start: int, stop: int) -> list[Box]:
    """Returns disjoint boxes that concatenate to elements [start, stop) of a flattened tensor; no extent is 0."""
    if start >= stop:
        return []
    if len(shape) == 1:
        return [Box((start,), (stop,))]
    row = math.prod(shape[1:])
    # whole rows
    first = -(-start // row)
    last = stop // row
    if first > last:
        return _in_row(shape, last, start, stop)
    boxes = _in_row(shape, first - 1, start, first * row)
    if first < last:
        origin = (0,) * (len(shape) - 1)
        boxes.append(Box((first, *origin), (last, *shape[1:])))
    return boxes + _in_row(shape, last, last * row, stop)


def _in_row(shape: Shape, index: int, start: int, stop: int) -> list[Box]:
    """Returns the boxes of a run within one row."""
    base = index * math.prod(shape[1:])
    inner = row_major_boxes(shape[1:], start - base, stop - base)
    return [Box((index, *box.start), (index + 1, *box.stop)) for box in inner]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Shape and dtype (a key of ITEM_BYTES) of a tensor."""

    shape: Shape
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Shard(NamedTuple):
    """A box of a local parameter, and the region of a canonical tensor that it holds.

    A parameter may stack canonical tensors along leading axes (experts, layers), along which the
    box has extent 1.

    Args:
        region: box with the last extents of ``box``, the last two exchanged where transposed.
        transposed: whether the parameter stores the transpose of a matrix.
    """

    param: str
    box: Box
    name: str
    region: Box
    transposed: bool = False

    def local(self, region: Box) -> Box:
        """Returns the box in the parameter of a part of this shard's region."""
        n = self.leading
        inner = _moved(region, self.region.start, self.box.start[n:], self.transposed)
        return Box(self.box.start[:n] + inner.start, self.box.stop[:n] + inner.stop)

    def within(self, box: Box) -> Shard | None:
        """Returns the part of this shard in a box of its parameter, or None."""
        inside = self.box.intersect(box)
        if inside is None:
            return None
        if inside == self.box:
            return self
        n = self.leading
        inner = Box(inside.start[n:], inside.stop[n:])
        region = _moved(inner, self.box.start[n:], self.region.start, self.transposed)
        return self._replace(box=inside, region=region)

    @property
    def leading(self) -> int:
        """Number of leading axes."""
        return len(self.box.start) - len(self.region.start)


@dataclass(frozen=True, kw_only=True)
class ShardMap:
    """The local parameters of a holder, each tiled by shards and padding; raises ValueError otherwise.

    Args:
        params: parameters in load order; those of a module follow one another.
        padding: boxes of parameters without canonical elements (padded vocabulary rows); zero after
            an import.
    """

    params: Mapping[str, TensorInfo]
    shards: tuple[Shard, ...]
    padding: tuple[tuple[str, Box], ...] = ()

    def __post_init__(self) -> None:
        boxes: dict[str, list[Box]] = {param: [] for param in self.params}
        # What the layers have in common is checked once.
        shards = {(shard.box, shard.region, shard.transposed): shard for shard in self.shards}
        for shard in shards.values():
            _check_extents(shard)
        tiles = [(shard.param, shard.box) for shard in self.shards]
        for param, box in (*tiles, *self.padding):
            if param not in boxes:
                raise ValueError(f"shard map: {param} is not among the parameters")
            boxes[param].append(box)
        tilings = {(info, tuple(boxes[param])): param for param, info in self.params.items()}
        for (info, tiling), param in tilings.items():
            _check_tiling(param, info, tiling)

    @classmethod
    def identity(cls, tensors: Mapping[str, TensorInfo], canonical: Callable[[str], str] = str) -> ShardMap:
        """Returns the map of a holder of whole canonical tensors, such as files.

        Args:
            tensors: tensors by the holder's names.
            canonical: function that returns the canonical name of a tensor; by default, the same.
        """
        shards: list[Shard] = []
        for name, info in tensors.items():
            box = Box.whole(info.shape)
            shards.append(Shard(name, box, canonical(name), box))
        return cls(params=dict(tensors), shards=tuple(shards))

    def of_tensor(self, name: str) -> ShardMap:
        """Returns the map of the parameters that hold a canonical tensor, and no other."""
        shards = tuple(shard for shard in self.shards if shard.name == name)
        return ShardMap(params={shard.param: self.params[shard.param] for shard in shards}, shards=shards)

    def joined(self, other: ShardMap) -> ShardMap:
        """Returns the map of a holder that also has another map's parameters."""
        return ShardMap(
            params={**self.params, **other.params},
            shards=(*self.shards, *other.shards),
            padding=(*self.padding, *other.padding),
        )

    def renamed(self, prefix: str) -> ShardMap:
        """Returns the map with canonical names after a prefix."""
        shards = tuple(shard._replace(name=prefix + shard.name) for shard in self.shards)
        return ShardMap(params=self.params, shards=shards, padding=self.padding)

    @property
    def nbytes(self) -> int:
        """Bytes of all local parameters, padding included."""
        return sum(info.nbytes for info in self.params.values())

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the contents, equal in every process."""
        params = [(param, info.shape, info.dtype) for param, info in self.params.items()]
        geometries: dict[tuple[Box, Box, bool], int] = {}
        shards: list[tuple[str, str, int]] = []
        for param, box, name, region, transposed in self.shards:
            geometry = geometries.setdefault((box, region, transposed), len(geometries))
            shards.append((param, name, geometry))
        content = repr((params, shards, list(geometries), self.padding))
        return hashlib.sha256(content.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint must contain.

    Args:
        tensors: canonical tensors that are read.
        ignored: patterns (as of fnmatch) of tensors that it may contain as well.
        untrained: patterns of further ones, which exports copy.
        bare_prefix: prefix of canonical names that the checkpoint may omit.
        tied: tensors that it may contain if they equal canonical ones, with the names of those.
        stacks: tensors [indices, rows, columns] that it may contain in place of canonical ones [rows,
            columns]: for each index, those whose rows follow one another there.
    """

    tensors: Mapping[str, TensorInfo]
    ignored: tuple[str, ...] = ()
    untrained: tuple[str, ...] = ()
    bare_prefix: str = ""
    tied: Mapping[str, str] = field(default_factory=dict[str, str])
    stacks: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict[str, Sequence[Sequence[str]]])

    def stacked_shape(self, stored: str) -> Shape:
        """Returns the shape of one of the ``stacks``."""
        stack = self.stacks[stored]
        members = [self.tensors[name].shape for name in stack[0]]
        rows = sum(shape[0] for shape in members)
        return (len(stack), rows, *members[0][1:])

    def shards(self, stored: str, info: TensorInfo) -> list[Shard]:
        """Returns what a stored tensor holds; nothing where that is not read."""
        if stored not in self.stacks:
            name = self.canonical(stored)
            box = Box.whole(info.shape)
            return [Shard(stored, box, name, box)] if name in self.tensors else []
        found: list[Shard] = []
        for index, members in enumerate(self.stacks[stored]):
            row = 0
            for name in members:
                shape = self.tensors[name].shape
                start = (index, row, *[0] * len(shape[1:]))
                row += shape[0]
                box = Box(start, (index + 1, row, *shape[1:]))
                found.append(Shard(stored, box, name, Box.whole(shape)))
        return found

    def canonical(self, stored: str) -> str:
        """Returns the canonical name of a stored tensor."""
        named = self.bare_prefix + stored
        return named if stored not in self.tensors and named in self.tensors else stored


def transpose(shape: Shape) -> Shape:
    """Returns a shape, or a corner of a box, with the last two axes exchanged."""
    *leading, rows, columns = shape
    return (*leading, columns, rows)


def _moved(box: Box, origin: Shape, base: Shape, transposed: bool) -> Box:
    """Moves a box from one corner to another, or also exchanges its last two axes."""
    start = tuple(map(sub, box.start, origin))
    stop = tuple(map(sub, box.stop, origin))
    if transposed:
        start = transpose(start)
        stop = transpose(stop)
    return Box(tuple(map(add, base, start)), tuple(map(add, base, stop)))


def _check_extents(shard: Shard) -> None:
    extents = shard.region.shape
    if shard.transposed and len(extents) > 1:
        extents = transpose(extents)
    leading = len(shard.box.start) - len(extents)
    if leading < 0 or shard.box.shape != (1,) * leading + extents or (shard.transposed and len(extents) < 2):
        region = f"{shard.name}{shard.region}"
        raise ValueError(f"shard map: {shard.param}{shard.box} and its region {region} differ in extents")


def _check_tiling(param: str, info: TensorInfo, boxes: Iterable[Box]) -> None:
    """Raises ValueError unless the boxes are disjoint and cover the parameter."""
    whole = Box.whole(info.shape)
    ordered = sorted(boxes)
    is_tiled = sum(box.size for box in ordered) == whole.size
    for i, box in enumerate(ordered):
        is_tiled &= whole.contains(box) and min(box.shape, default=1) >= 1
        for other in ordered[i + 1 :]:
            if box.start and other.start[0] >= box.stop[0]:
                break
            is_tiled &= box.intersect(other) is None
    if not is_tiled:
        raise ValueError(f"shard map: the shards and padding of {param} do not tile its shape {info.shape}")
