"""Parameter types: how Megatron and vLLM store groups of canonical tensors, for any TP and EP.

Every local parameter is a stack: ranges of canonical tensors concatenated along one axis, perhaps below leading axes. A
parameter type says which ranges each engine stacks; the shard maps of both engines follow from that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

from megarl.weights.shard_map import Box, Shape

Engine = Literal["megatron", "vllm"]
Width = Literal["hidden", "attention", "ffn", "head"]
Count = Literal["one", "positions", "experts"]

VOCAB_MULTIPLE = 64
"""vLLM pads the vocabulary to a multiple of this, Megatron to a multiple of this times TP."""


@dataclass(frozen=True, kw_only=True)
class Dims:
    """The sizes of a decoder.

    Args:
        ffn: channels of the MLP, or of each expert.
        positions: maximum sequence length.
        experts: per layer; 0 in a dense model.
    """

    vocab: int
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    positions: int
    experts: int = 0

    def width(self, what: Width) -> int:
        attention = self.heads * self.head_dim
        return {"hidden": self.hidden, "attention": attention, "ffn": self.ffn, "head": self.head_dim}[what]

    def count(self, what: Count) -> int:
        return {"one": 1, "positions": self.positions, "experts": self.experts}[what]

    def padded_vocab(self, engine: Engine, tp: int) -> int:
        """Returns the rows of an engine's embedding over all TP ranks."""
        multiple = VOCAB_MULTIPLE * (tp if engine == "megatron" else 1)
        return -(-self.vocab // multiple) * multiple


@dataclass(frozen=True, kw_only=True)
class GroupRank:
    """A rank of a group of ``size``."""

    rank: int = 0
    size: int = 1

    def range(self, total: int) -> tuple[int, int]:
        """Returns the rank's range of ``total`` items, which ``size`` divides."""
        part, rest = divmod(total, self.size)
        assert rest == 0, (total, self.size)
        return self.rank * part, (self.rank + 1) * part


@dataclass(frozen=True, kw_only=True)
class ShardCoords:
    """The part of a layer that an engine's rank holds: its TP shard of every matrix, of its EP shard of the experts."""

    tp: GroupRank
    ep: GroupRank = GroupRank()


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRange:
    """Indices [start, stop) of a canonical tensor along the stacked axis; padding where ``tensor`` is None."""

    tensor: str | None
    start: int
    stop: int

    def within(self, start: int, stop: int) -> TensorRange:
        """Returns indices [start, stop) of this range."""
        assert 0 <= start <= stop <= self.stop - self.start
        return TensorRange(tensor=self.tensor, start=self.start + start, stop=self.start + stop)


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A local parameter, or one of the matrices or vectors that it has along leading axes.

    Args:
        shape: of the matrix or vector.
        parts: concatenated along ``axis``.
        transposed: the canonical tensors are stored with rows and columns exchanged.
        at, of: the indices of the matrix along the parameter's leading axes, and the extents of those.
    """

    param: str
    shape: Shape
    parts: tuple[TensorRange, ...]
    axis: int = 0
    transposed: bool = False
    at: Shape = ()
    of: Shape = ()

    @cached_property
    def boxes(self) -> list[tuple[Box, str | None, Box]]:
        """By part, the box in the parameter, the canonical tensor (None: padding), and the box in that."""
        found: list[tuple[Box, str | None, Box]] = []
        offset = 0
        above = tuple(i + 1 for i in self.at)
        for part in self.parts:
            inner = self._along_axis(offset, offset + part.stop - part.start)
            region = self._along_axis(part.start, part.stop)
            if self.transposed:
                region = Box(region.start[::-1], region.stop[::-1])
            found.append((Box(self.at + inner.start, above + inner.stop), part.tensor, region))
            offset += part.stop - part.start
        return found

    def _along_axis(self, start: int, stop: int) -> Box:
        low, high = [0] * len(self.shape), list(self.shape)
        low[self.axis], high[self.axis] = start, stop
        return Box(tuple(low), tuple(high))


class ParamType(Protocol):
    """A group of canonical tensors that the engines store together; names have no layer prefix."""

    def tensors(self, dims: Dims) -> dict[str, Shape]:
        """Returns the canonical tensors' shapes."""
        ...

    def stacks(self, engine: Engine, dims: Dims, coords: ShardCoords) -> Iterator[Stack]:
        """Yields the parameters in which one rank of an engine holds them."""
        ...


@dataclass(frozen=True)
class Names:
    """Names of one thing in HF (those of canonical tensors), Megatron and vLLM; vLLM's are HF's by default."""

    hf: str
    megatron: str
    vllm: str | None = None

    def of(self, engine: Engine) -> str:
        return self.megatron if engine == "megatron" else self.vllm or self.hf


@dataclass(frozen=True, kw_only=True)
class Vector:
    """A norm's weight, and perhaps bias, whole on every TP rank."""

    names: Names
    width: Width = "hidden"
    bias: bool = False

    def tensors(self, dims: Dims) -> dict[str, Shape]:
        return {f"{self.names.hf}.{kind}": (dims.width(self.width),) for kind in _kinds(self.bias)}

    def stacks(self, engine: Engine, dims: Dims, coords: ShardCoords) -> Iterator[Stack]:
        n = dims.width(self.width)
        for kind in _kinds(self.bias):
            part = TensorRange(tensor=f"{self.names.hf}.{kind}", start=0, stop=n)
            yield Stack(param=f"{self.names.of(engine)}.{kind}", shape=(n,), parts=(part,))


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A [rows, hidden] matrix, whole on every TP rank: learned positions, a router, a score head."""

    names: Names
    rows: Count

    def tensors(self, dims: Dims) -> dict[str, Shape]:
        return {f"{self.names.hf}.weight": (dims.count(self.rows), dims.hidden)}

    def stacks(self, engine: Engine, dims: Dims, coords: ShardCoords) -> Iterator[Stack]:
        rows = dims.count(self.rows)
        part = TensorRange(tensor=f"{self.names.hf}.weight", start=0, stop=rows)
        yield Stack(param=f"{self.names.of(engine)}.weight", shape=(rows, dims.hidden), parts=(part,))


@dataclass(frozen=True, kw_only=True)
class VocabRows:
    """A [vocabulary, hidden] matrix split by rows and padded."""

    names: Names

    def tensors(self, dims: Dims) -> dict[str, Shape]:
        return {f"{self.names.hf}.weight": (dims.vocab, dims.hidden)}

    def stacks(self, engine: Engine, dims: Dims, coords: ShardCoords) -> Iterator[Stack]:
        start, stop = coords.tp.range(dims.padded_vocab(engine, coords.tp.size))
        yield self.rows(engine, dims, start, stop)

    def rows(self, engine: Engine, dims: Dims, start: int, stop: int) -> Stack:
        """Returns rows [start, stop) of the padded matrix."""
        known = max(start, min(stop, dims.vocab))
        parts = (
            TensorRange(tensor=f"{self.names.hf}.weight", start=start, stop=known),
            TensorRange(tensor=None, start=known, stop=stop),
        )
        filled = tuple(part for part in parts if part.stop > part.start)
        return Stack(param=f"{self.names.of(engine)}.weight", shape=(stop - start, dims.hidden), parts=filled)


@dataclass(frozen=True, kw_only=True)
class ColumnParallel:
    """A [width, hidden] matrix, transposed in HF if so marked, whose outputs TP splits, and perhaps its bias."""

    names: Names
    outputs: Width
    bias: bool = False
    transposed: bool = False

    def tensors(self, dims: Dims) -> dict[str, Shape]:
        return column_tensors([(self.names.hf, dims.width(self.outputs))], dims, self.bias, self.transposed)

    def stacks(self, engine: Engine, dims: Dims, coords: ShardCoords) -> Iterator[Stack]:
        start, stop = coords.tp.range(dims.width(self.outputs))
        parts = [TensorRange(tensor=self.names.hf, start=start, stop=stop)]
        yield from column_stacks(self.names.of(engine), parts, dims, self.bias, self.transposed)


@dataclass(frozen=True, kw_only=True)
class RowParallel:
    """A [hidden, width] matrix, transposed in HF if so marked, whose inputs TP splits; its bias is whole."""

    names: Names
    inputs: Width
    bias: bool = False
    transposed: bool = False

    def tensors(self, dims: Dims) -> dict[str, Shape]:
        shape = (dims.hidden, dims.width(self.inputs))
        weight = {f"{self.names.hf}.weight": shape[::-1] if self.transposed else shape}
        return weight | ({f"{self.names.hf}.bias": (dims.hidden,)} if self.bias else {})

    def stacks(self, engine: Engine, dims: Dims, coords: ShardCoords) -> Iterator[Stack]:
        hf, local = self.names.hf, self.names.of(engine)
        start, stop = coords.tp.range(dims.width(self.inputs))
        yield Stack(
            param=f"{local}.weight",
            shape=(dims.hidden, stop - start),
            parts=(TensorRange(tensor=f"{hf}.weight", start=start, stop=stop),),
            axis=1,
            transposed=self.transposed,
        )
        if self.bias:
            rows = TensorRange(tensor=f"{hf}.bias", start=0, stop=dims.hidden)
            yield Stack(param=f"{local}.bias", shape=(dims.hidden,), parts=(rows,))


def column_tensors(
    projections: Sequence[tuple[str, int]], dims: Dims, bias: bool, transposed: bool = False
) -> dict[str, Shape]:
    """Returns the canonical tensors of projections from the hidden channels.

    Args:
        projections: names and rows; projections of one name are concatenated in one tensor.
        transposed: HF stores the matrices as [hidden, rows].
    """
    rows: dict[str, int] = {}
    for name, n in projections:
        rows[name] = rows.get(name, 0) + n
    tensors: dict[str, Shape] = {}
    for name, n in rows.items():
        tensors[f"{name}.weight"] = (dims.hidden, n) if transposed else (n, dims.hidden)
        if bias:
            tensors[f"{name}.bias"] = (n,)
    return tensors


def located(projections: Sequence[tuple[str, int]]) -> list[TensorRange]:
    """Returns the range of each projection in its canonical tensor; see ``column_tensors``."""
    rows: dict[str, int] = {}
    parts: list[TensorRange] = []
    for name, n in projections:
        first = rows.get(name, 0)
        rows[name] = first + n
        parts.append(TensorRange(tensor=name, start=first, stop=first + n))
    return parts


def cut(parts: Sequence[TensorRange], start: int, stop: int) -> list[TensorRange]:
    """Returns indices [start, stop) of stacked ranges."""
    found: list[TensorRange] = []
    offset = 0
    for part in parts:
        n = part.stop - part.start
        low, high = max(start - offset, 0), min(stop - offset, n)
        if low < high:
            found.append(part.within(low, high))
        offset += n
    return found


def column_stacks(
    param: str, parts: Sequence[TensorRange], dims: Dims, bias: bool, transposed: bool = False
) -> Iterator[Stack]:
    """Yields a fused projection's weight and perhaps bias, stacked from the same rows of projections."""
    rows = sum(part.stop - part.start for part in parts)
    for kind in _kinds(bias):
        named = tuple(TensorRange(tensor=f"{part.tensor}.{kind}", start=part.start, stop=part.stop) for part in parts)
        matrix = kind == "weight"
        shape = (rows, dims.hidden) if matrix else (rows,)
        yield Stack(param=f"{param}.{kind}", shape=shape, parts=named, transposed=transposed and matrix)


def _kinds(bias: bool) -> tuple[str, ...]:
    return ("weight", "bias") if bias else ("weight",)
