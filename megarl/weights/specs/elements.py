"""The vocabulary of the specs: how a group of canonical tensors is stored by Megatron and by vLLM, for any TP.

Every local parameter here is a stack: ranges of canonical tensors one after the other along one axis. An element
says which ranges each engine stacks; both engines' maps follow from that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from megarl.weights.regions import Shape

Engine = Literal["megatron", "vllm"]
Width = Literal["hidden", "attention", "ffn"]

VOCAB_MULTIPLE = 64
"""vLLM pads the vocabulary to a multiple of this; Megatron's is padded to a multiple of this times TP."""


@dataclass(frozen=True, kw_only=True)
class Dims:
    """The sizes of a decoder; ``head_dim`` is the width of one attention head, ``ffn`` of the MLP."""

    vocab: int
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    def width(self, what: Width) -> int:
        """The number of channels of a kind of activation."""
        return {"hidden": self.hidden, "attention": self.heads * self.head_dim, "ffn": self.ffn}[what]

    def padded_vocab(self, engine: Engine, tp: int) -> int:
        """The rows of an engine's embedding over all TP ranks."""
        multiple = VOCAB_MULTIPLE * (tp if engine == "megatron" else 1)
        return -(-self.vocab // multiple) * multiple


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Which TP rank of how many."""

    rank: int
    size: int

    def range(self, total: int) -> tuple[int, int]:
        """The rank's range of ``total`` things that TP divides evenly (checked before)."""
        part, rest = divmod(total, self.size)
        assert rest == 0, (total, self.size)
        return self.rank * part, (self.rank + 1) * part


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Indices [start, stop) of the canonical tensor ``tensor`` along the stacked axis; a hole where that is None."""

    tensor: str | None
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A local parameter: its parts one after the other along ``axis``; ``shape`` is its shape, the axis included."""

    param: str
    axis: int
    parts: tuple[Part, ...]
    shape: Shape


class Element(Protocol):
    """A group of canonical tensors that the engines store together; names have no layer prefix."""

    def tensors(self, dims: Dims) -> dict[str, Shape]:
        """The canonical tensors and their shapes."""
        ...

    def stacks(self, engine: Engine, dims: Dims, shard: Shard) -> Iterator[Stack]:
        """The parameters in which one TP rank of an engine holds them."""
        ...


@dataclass(frozen=True, kw_only=True)
class Names:
    """What HF, Megatron and vLLM call one thing; ``hf`` names the canonical tensors."""

    hf: str
    megatron: str
    vllm: str

    def of(self, engine: Engine) -> str:
        return self.megatron if engine == "megatron" else self.vllm


@dataclass(frozen=True, kw_only=True)
class Replicated:
    """A vector over the hidden channels that every TP rank holds whole: a norm's weight."""

    names: Names

    def tensors(self, dims: Dims) -> dict[str, Shape]:
        return {f"{self.names.hf}.weight": (dims.hidden,)}

    def stacks(self, engine: Engine, dims: Dims, shard: Shard) -> Iterator[Stack]:
        part = Part(tensor=f"{self.names.hf}.weight", start=0, stop=dims.hidden)
        yield Stack(param=f"{self.names.of(engine)}.weight", axis=0, parts=(part,), shape=(dims.hidden,))


@dataclass(frozen=True, kw_only=True)
class VocabRows:
    """A [vocabulary, hidden] matrix split by rows; the rows that pad the vocabulary are holes."""

    names: Names

    def tensors(self, dims: Dims) -> dict[str, Shape]:
        return {f"{self.names.hf}.weight": (dims.vocab, dims.hidden)}

    def stacks(self, engine: Engine, dims: Dims, shard: Shard) -> Iterator[Stack]:
        start, stop = shard.range(dims.padded_vocab(engine, shard.size))
        known = max(start, min(stop, dims.vocab))
        parts = (
            Part(tensor=f"{self.names.hf}.weight", start=start, stop=known),
            Part(tensor=None, start=known, stop=stop),
        )
        filled = tuple(part for part in parts if part.stop > part.start)
        yield Stack(param=f"{self.names.of(engine)}.weight", axis=0, parts=filled, shape=(stop - start, dims.hidden))


@dataclass(frozen=True, kw_only=True)
class ScoreHead:
    """The [1, hidden] head of a value or reward model, whole on every TP rank."""

    names: Names

    def tensors(self, dims: Dims) -> dict[str, Shape]:
        return {f"{self.names.hf}.weight": (1, dims.hidden)}

    def stacks(self, engine: Engine, dims: Dims, shard: Shard) -> Iterator[Stack]:
        part = Part(tensor=f"{self.names.hf}.weight", start=0, stop=1)
        yield Stack(param=f"{self.names.of(engine)}.weight", axis=0, parts=(part,), shape=(1, dims.hidden))


@dataclass(frozen=True, kw_only=True)
class RowParallel:
    """A [hidden, width] matrix whose input channels TP splits; its bias is whole on every rank."""

    names: Names
    inputs: Width
    bias: bool = False

    def tensors(self, dims: Dims) -> dict[str, Shape]:
        weight = {f"{self.names.hf}.weight": (dims.hidden, dims.width(self.inputs))}
        return weight | ({f"{self.names.hf}.bias": (dims.hidden,)} if self.bias else {})

    def stacks(self, engine: Engine, dims: Dims, shard: Shard) -> Iterator[Stack]:
        hf, local = self.names.hf, self.names.of(engine)
        start, stop = shard.range(dims.width(self.inputs))
        columns = Part(tensor=f"{hf}.weight", start=start, stop=stop)
        yield Stack(param=f"{local}.weight", axis=1, parts=(columns,), shape=(dims.hidden, stop - start))
        if self.bias:
            rows = Part(tensor=f"{hf}.bias", start=0, stop=dims.hidden)
            yield Stack(param=f"{local}.bias", axis=0, parts=(rows,), shape=(dims.hidden,))


@dataclass(frozen=True, kw_only=True)
class FusedGateUp:
    """The gate's and the up-projection's rows, split over TP each, in one matrix: [gate shard; up shard]."""

    gate: str
    up: str
    megatron: str
    vllm: str
    bias: bool = False

    def tensors(self, dims: Dims) -> dict[str, Shape]:
        return _rows({self.gate: dims.ffn, self.up: dims.ffn}, dims.hidden, bias=self.bias)

    def stacks(self, engine: Engine, dims: Dims, shard: Shard) -> Iterator[Stack]:
        start, stop = shard.range(dims.ffn)
        parts = [Part(tensor=name, start=start, stop=stop) for name in (self.gate, self.up)]
        yield from _fused(self.megatron if engine == "megatron" else self.vllm, parts, dims.hidden, bias=self.bias)


@dataclass(frozen=True, kw_only=True)
class FusedQKV:
    """The query, key and value projections in one matrix.

    Megatron stacks [query heads of the group; key; value] per KV group, and TP splits the groups. vLLM stacks
    [query; key; value] of the rank's heads; where TP exceeds the KV heads, neighbouring ranks hold the same one.
    """

    query: str
    key: str
    value: str
    megatron: str
    vllm: str
    bias: bool = False

    def tensors(self, dims: Dims) -> dict[str, Shape]:
        kv = dims.kv_heads * dims.head_dim
        rows = {self.query: dims.width("attention"), self.key: kv, self.value: kv}
        return _rows(rows, dims.hidden, bias=self.bias)

    def stacks(self, engine: Engine, dims: Dims, shard: Shard) -> Iterator[Stack]:
        if engine == "megatron":
            yield from _fused(self.megatron, self._megatron_parts(dims, shard), dims.hidden, bias=self.bias)
        else:
            yield from _fused(self.vllm, self._vllm_parts(dims, shard), dims.hidden, bias=self.bias)

    def _megatron_parts(self, dims: Dims, shard: Shard) -> list[Part]:
        per_group = dims.heads // dims.kv_heads
        parts: list[Part] = []
        for group in range(*shard.range(dims.kv_heads)):
            parts.append(_heads(self.query, group * per_group, (group + 1) * per_group, dims))
            parts.extend(_heads(name, group, group + 1, dims) for name in (self.key, self.value))
        return parts

    def _vllm_parts(self, dims: Dims, shard: Shard) -> list[Part]:
        if shard.size <= dims.kv_heads:
            first, last = shard.range(dims.kv_heads)
        else:
            first = shard.rank // (shard.size // dims.kv_heads)
            last = first + 1
        query = _heads(self.query, *shard.range(dims.heads), dims)
        return [query, *(_heads(name, first, last, dims) for name in (self.key, self.value))]


def _heads(name: str, first: int, last: int, dims: Dims) -> Part:
    """The rows of attention heads [first, last)."""
    return Part(tensor=name, start=first * dims.head_dim, stop=last * dims.head_dim)


def _rows(rows: dict[str, int], width: int, *, bias: bool) -> dict[str, Shape]:
    """The canonical tensors of projections with these numbers of rows."""
    weights: dict[str, Shape] = {f"{name}.weight": (n, width) for name, n in rows.items()}
    return weights | ({f"{name}.bias": (n,) for name, n in rows.items()} if bias else {})


def _fused(param: str, parts: Sequence[Part], width: int, *, bias: bool) -> Iterator[Stack]:
    """A fused projection's weight and, where there is one, its bias, stacked from the same rows."""
    total = sum(part.stop - part.start for part in parts)
    for kind, shape in (("weight", (total, width)), ("bias", (total,)))[: 2 if bias else 1]:
        named = tuple(Part(tensor=f"{part.tensor}.{kind}", start=part.start, stop=part.stop) for part in parts)
        yield Stack(param=f"{param}.{kind}", axis=0, parts=named, shape=shape)
