"""Assemblies: tensors of the output that are made together, and the stored tensors that they are made from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch

from megarl.convert.stored import Stored
from megarl.errors import UsageError
from megarl.weights.plan import Copy
from megarl.weights.shard_map import Box, Shape, Shard, ShardMap, TensorInfo


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """Tensors that are in memory at the same time.

    Args:
        tensors: tensors in the order in which they are written; what no copy fills is zero.
        copies: copies into them.
        sources: stored tensors that are read.
    """

    tensors: Mapping[str, TensorInfo]
    copies: Sequence[Copy]
    sources: Mapping[str, Stored]

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.tensors.values())

    @property
    def memory(self) -> int:
        """Bytes that ``read`` and a write of the tensors take at most: all of them, one more, and its copy."""
        infos = [*self.tensors.values(), *(source.info for source in self.sources.values())]
        return self.nbytes + 2 * max(info.nbytes for info in infos)

    def read(self) -> dict[str, torch.Tensor]:
        """Reads one source after the other; raises CheckpointError, or UsageError where a value does not fit."""
        tensors: dict[str, torch.Tensor] = {}
        for name, info in self.tensors.items():
            tensors[name] = torch.zeros(info.shape, dtype=getattr(torch, info.dtype))
        for name, source in self.sources.items():
            copies = [copy for copy in self.copies if copy.source == name]
            first = min(copy.source_box.start[0] for copy in copies)
            stop = max(copy.source_box.stop[0] for copy in copies)
            rows = source.read_rows(first, stop)
            for copy in copies:
                outer, *inner = copy.source_box.slices
                values = copy.arranged(rows[outer.start - first : outer.stop - first, *inner])
                copy_values(values, tensors[copy.target][copy.target_box.slices], source.path)
        return tensors


def assemble(
    groups: Iterable[Mapping[str, TensorInfo]], copies: Iterable[Copy], stored: Mapping[str, Stored]
) -> list[Assembly]:
    """Returns an assembly for each group of tensors.

    Args:
        copies: copies into the tensors of all groups.
        stored: sources of the copies.
    """
    copies_into: dict[str, list[Copy]] = defaultdict(list)
    for copy in copies:
        copies_into[copy.target].append(copy)
    assemblies: list[Assembly] = []
    for tensors in groups:
        filling: list[Copy] = []
        for name in tensors:
            filling += copies_into[name]
        sources = {copy.source: stored[copy.source] for copy in filling}
        assemblies.append(Assembly(tensors=tensors, copies=filling, sources=sources))
    return assemblies


def copy_values(values: torch.Tensor, target: torch.Tensor, path: Path) -> None:
    """Copies values of a file into a tensor; raises UsageError where finite ones are too large for its dtype."""
    target.copy_(values)
    if torch.finfo(target.dtype).max >= torch.finfo(values.dtype).max or not target.isinf().any():
        return
    if (target.isinf() & values.isfinite()).any():
        wider = torch.bfloat16 if target.dtype == torch.float16 else values.dtype
        problem = f"{path.name} has values that {target.dtype} cannot hold; choose --dtype {wider}"
        raise UsageError(problem.replace("torch.", ""))


def shards_within(whole: ShardMap, boxes: Mapping[str, tuple[str, Box]]) -> Iterator[Shard]:
    """Yields what boxes of the parameters of ``whole`` hold of canonical tensors.

    Args:
        boxes: parameter and box, by the name that the box gets as a parameter.
    """
    # Parameters may stack matrices along leading axes: shards are found by these indices.
    leading: dict[str, int] = defaultdict(int)
    shards_at: dict[tuple[str, Shape], list[Shard]] = defaultdict(list)
    for shard in whole.shards:
        leading[shard.param] = shard.leading
        shards_at[shard.param, shard.box.start[: shard.leading]].append(shard)
    for name, (param, box) in boxes.items():
        stacked = [range(part.start, part.stop) for part in box.slices[: leading[param]]]
        for index in product(*stacked):
            for shard in shards_at[param, index]:
                part = shard.within(box)
                if part is not None:
                    yield part._replace(param=name, box=part.box.relative_to(box))
