"""Blocks: the parts of tensors that are written at a time, and the stored boxes that they are read from."""

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
class Block:
    """A part of a target tensor that is in memory at one time.

    Args:
        box: in the target; its elements are contiguous in row-major order.
        copies: fill the box, in the target's coordinates; the rest of it is zero.
    """

    target: str
    box: Box
    dtype: str
    copies: tuple[Copy, ...]

    @property
    def nbytes(self) -> int:
        return self.box.size * ITEM_BYTES[self.dtype]

    def read(self, sources: Mapping[str, Stored], reader: BoxReader) -> torch.Tensor:
        """Reads the elements of the box; raises UsageError where a finite value does not fit the dtype."""
        values = torch.zeros(self.box.shape, dtype=getattr(torch, self.dtype))
        for copy in self.copies:
            inside = relative_to(copy.target_box, self.box.start)
            reader.copy(sources[copy.source], copy, values[inside.slices])
        return values


def stored_map(whole: ShardMap, boxes: Mapping[str, tuple[str, Box]]) -> ShardMap:
    """Returns the map of a holder whose parameters are boxes of those of ``whole``; what no shard covers is padding."""
    # Parameters may stack matrices along leading axes: shards are found by these indices.
    leading: dict[str, int] = defaultdict(int)
    shards_at: dict[tuple[str, Shape], list[Shard]] = defaultdict(list)
    for shard in whole.shards:
        leading[shard.param] = shard.leading
        shards_at[shard.param, shard.box.start[: shard.leading]].append(shard)
    shards: list[Shard] = []
    padding: list[Padding] = []
    for name, (param, box) in boxes.items():
        uncovered = [box]
        for at in product(*(range(s.start, s.stop) for s in box.slices[: leading[param]])):
            for shard in shards_at.get((param, at), ()):
                part = shard.within(box)
                if part is not None:
                    shards.append(part._replace(param=name, box=relative_to(part.box, box.start)))
                    uncovered = [rest for inner in uncovered for rest in inner.without(part.box)]
        padding += [Padding(param=name, box=relative_to(rest, box.start)) for rest in uncovered]
    params = {name: TensorInfo(box.shape, whole.params[param].dtype) for name, (param, box) in boxes.items()}
    return ShardMap(params=params, shards=tuple(shards), padding=tuple(padding))


def plan_blocks(source: ShardMap, target: ShardMap, block_bytes: int) -> Iterator[Block]:
    """Plans the copies from one set of files to another; yields the blocks of one target after the other."""
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
    """Returns the stored tensors that blocks are read from."""
    return {copy.source: stored[copy.source] for block in blocks for copy in block.copies}
