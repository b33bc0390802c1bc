"""Stacks: parameters of an engine as ranges of canonical tensors, one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megarl.models.dims import Engine
from megarl.weights.shard_map import Box, Shape, transpose


@dataclass(frozen=True, kw_only=True)
class ShardCoords:
    """The part of a layer that a rank holds: a TP shard of matrices, of an EP shard of the experts.

    Args:
        vocab_rows: rows of embedding and output layer, with padding; None for the engine's.
        tp_rank, tp: the rank among those that split each matrix, and their number.
        ep_rank, ep: the rank among those that have different experts, and their number.
    """

    vocab_rows: int | None = None
    tp_rank: int = 0
    tp: int = 1
    ep_rank: int = 0
    ep: int = 1

    def tp_range(self, total: int) -> tuple[int, int]:
        """Returns the TP rank's range of ``total`` items, which ``tp`` divides."""
        part, rest = divmod(total, self.tp)
        assert rest == 0, (total, self.tp)
        return self.tp_rank * part, (self.tp_rank + 1) * part

    def experts(self, total: int) -> range:
        """Returns the EP rank's experts of ``total``, which ``ep`` divides."""
        local = total // self.ep
        return range(self.ep_rank * local, (self.ep_rank + 1) * local)


class TensorRange(NamedTuple):
    """Indices [start, stop) of a canonical tensor along the stacked axis; padding where ``tensor`` is None."""

    tensor: str | None
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def within(self, start: int, stop: int) -> TensorRange:
        """Returns indices [start, stop) of this range."""
        assert 0 <= start <= stop <= self.size
        return TensorRange(self.tensor, self.start + start, self.start + stop)


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A local parameter, or one of the matrices or vectors that it has along leading axes.

    Args:
        shape: shape of the matrix or vector.
        parts: ranges that are concatenated along ``axis``.
        transposed: whether the canonical tensors have rows and columns exchanged.
        at, of: indices of the matrix along the parameter's leading axes, and the extents of those.
        canonical_at: its indices along the leading axes of the canonical tensors.
        dtype: dtype of the parameter, if it is not the model's.
    """

    param: str
    shape: Shape
    parts: tuple[TensorRange, ...]
    axis: int = 0
    transposed: bool = False
    at: Shape = ()
    of: Shape = ()
    canonical_at: Shape = ()
    dtype: str | None = None

    @cached_property
    def boxes(self) -> list[tuple[Box, str | None, Box]]:
        """By part, the box in the parameter, the canonical tensor (None: padding), and the box in that."""
        found: list[tuple[Box, str | None, Box]] = []
        offset = 0
        above = tuple(i + 1 for i in self.at)
        canonical_above = tuple(i + 1 for i in self.canonical_at)
        for part in self.parts:
            inner = self._along_axis(offset, offset + part.size)
            region = self._along_axis(part.start, part.stop)
            if self.transposed:
                region = Box(transpose(region.start), transpose(region.stop))
            region = Box(self.canonical_at + region.start, canonical_above + region.stop)
            found.append((Box(self.at + inner.start, above + inner.stop), part.tensor, region))
            offset += part.size
        return found

    def _along_axis(self, start: int, stop: int) -> Box:
        low = [0] * len(self.shape)
        high = list(self.shape)
        low[self.axis] = start
        high[self.axis] = stop
        return Box(tuple(low), tuple(high))


@dataclass(frozen=True)
class Names:
    """Names of one thing in HF, those of canonical tensors, in Megatron, and in vLLM: by default HF's."""

    hf: str
    megatron: str
    vllm: str | None = None

    def of(self, engine: Engine) -> str:
        if engine == "megatron":
            return self.megatron
        return self.vllm or self.hf
