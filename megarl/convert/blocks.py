"""Blocks: what to read from stored boxes of tensors for each part of a tensor that is written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product

import torch

from megarl.convert.stored import BoxReader, Stored, relative_to
from megarl.weights.hf_files import FILES_RANK
from megarl.weights.plan import Copy
from megarl.weights.planner import Holder, plan
from megarl.weights.shard_map import ITEM_BYTES, Box, Padding, Shape, Shard, ShardMap, TensorInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBox:
    """A box of a parameter that is stored by itself, in some dtype."""

    param: str
    box: Box
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A part of a target tensor that is in memory at one time.

    Args:
        target: name of the tensor.
        box: in the target; its elements are contiguous in row-major order.
        dtype: of the target.
        copies: fill the box; the rest of it is zero. Their target boxes are in the target's coordinates.
    """

    target: str
    box: Box
    dtype: str
    copies: tuple[Copy, ...]

    @property
    def nbytes(self) -> int:
        return self.box.size * ITEM_BYTES[self.dtype]

    def read(self, sources: Mapping[str, Stored], reader: BoxReader) -> torch.Tensor:
        """Reads the elements of the box.

        Raises:
            CheckpointError: a file is damaged.
            UsageError: a finite value does not fit the dtype.
        """
        values = torch.zeros(self.box.shape, dtype=getattr(torch, self.dtype))
        for copy in self.copies:
            inside = relative_to(copy.target_box, self.box.start)
            reader.copy(sources[copy.source], copy, values[inside.slices])
        return values


def stored_map(whole: ShardMap, boxes: Mapping[str, StoredBox]) -> ShardMap:
    """The map of a holder whose parameters are stored boxes, by name; what no shard covers is a padding.

    Args:
        whole: map of the parameters that the boxes are parts of.
    """
    # Parameters may stack matrices along leading axes: shards are found by these indices.
    leading: dict[str, int] = defaultdict(int)
    shards_at: dict[tuple[str, Shape], list[Shard]] = defaultdict(list)
    for shard in whole.shards:
        leading[shard.param] = len(shard.box.start) - len(shard.region.start)
        shards_at[shard.param, shard.box.start[: leading[shard.param]]].append(shard)
    shards: list[Shard] = []
    padding: list[Padding] = []
    for name, stored in boxes.items():
        uncovered = [stored.box]
        for at in product(*(range(s.start, s.stop) for s in stored.box.slices[: leading[stored.param]])):
            for shard in shards_at.get((stored.param, at), ()):
                part = shard.within(stored.box)
                if part is not None:
                    shards.append(part._replace(param=name, box=relative_to(part.box, stored.box.start)))
                    uncovered = [rest for box in uncovered for rest in _without(box, part.box)]
        padding += [Padding(param=name, box=relative_to(box, stored.box.start)) for box in uncovered]
    params = {name: TensorInfo(stored.box.shape, stored.dtype) for name, stored in boxes.items()}
    return ShardMap(params=params, shards=tuple(shards), padding=tuple(padding))


def plan_blocks(source: ShardMap, target: ShardMap, block_bytes: int) -> Iterator[Block]:
    """Plans the copies from one set of files to another; yields the blocks of one target after the other.

    Raises:
        PlanError: the source lacks a region; the first of each tensor is named.
    """
    transfer = plan([Holder(rank=FILES_RANK, map=source)], [Holder(rank=0, map=target)], block_bytes)
    receiver = transfer.receivers[0]
    for bucket, messages in zip(receiver.buckets, receiver.messages, strict=True):
        copies: dict[str, list[Copy]] = {param: [] for param in bucket.params}
        for copy in (copy for message in messages for copy in message.copies):
            copies[copy.target].append(copy)
        for param, filling in copies.items():
            info = target.params[param]
            box = bucket.box or Box.whole(info.shape)
            yield Block(target=param, box=box, dtype=info.dtype, copies=tuple(filling))


def group_blocks(blocks: Iterable[Block], nbytes: int) -> list[tuple[Block, ...]]:
    """Groups neighbouring blocks, up to a size."""
    groups: list[list[Block]] = []
    filled = nbytes
    for block in blocks:
        if filled + block.nbytes > nbytes:
            groups.append([])
            filled = 0
        groups[-1].append(block)
        filled += block.nbytes
    return [tuple(group) for group in groups]


def sources_of(blocks: Iterable[Block], stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """The stored tensors that blocks are read from."""
    return {copy.source: stored[copy.source] for block in blocks for copy in block.copies}


def _without(box: Box, padding: Box) -> list[Box]:
    inside = box.intersect(padding)
    return [box] if inside is None else box.without(inside)
