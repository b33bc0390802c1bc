"""Parameter types that engines fuse: queries with keys and values, gates with up-projections, experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megarl.models.param_types import (
    Dims,
    Engine,
    ShardCoords,
    Stack,
    TensorRange,
    column_stacks,
    column_tensors,
    cut,
    located,
)
from megarl.weights.shard_map import Shape

MEGATRON_EXPERTS = "mlp.experts.local_experts.{}"
"""Megatron's module of an expert, by its local index."""


@dataclass(frozen=True, kw_only=True)
class FusedQKV:
    """The query, key and value projections in one matrix.

    Megatron stacks [query heads of the group; key; value] per KV group; TP splits these rows, and cuts groups where it
    exceeds their number. vLLM stacks [query; key; value] of the rank's heads; where TP exceeds the KV heads,
    neighbouring ranks hold the same one.

    Args:
        query, key, value: HF's projections; those of one name are concatenated in one tensor.
        transposed: HF stores the matrices as [hidden, rows].
    """

    query: str
    key: str
    value: str
    megatron: str
    vllm: str
    bias: bool = False
    transposed: bool = False

    def tensors(self, dims: Dims) -> dict[str, Shape]:
        return column_tensors(self._projections(dims), dims, self.bias, self.transposed)

    def stacks(self, engine: Engine, dims: Dims, coords: ShardCoords) -> Iterator[Stack]:
        megatron = engine == "megatron"
        parts = self._megatron_parts(dims, coords) if megatron else self._vllm_parts(dims, coords)
        name = self.megatron if megatron else self.vllm
        yield from column_stacks(name, parts, dims, self.bias, self.transposed)

    def _projections(self, dims: Dims) -> list[tuple[str, int]]:
        kv = dims.kv_heads * dims.head_dim
        return [(self.query, dims.width("attention")), (self.key, kv), (self.value, kv)]

    def _megatron_parts(self, dims: Dims, coords: ShardCoords) -> list[TensorRange]:
        query, key, value = located(self._projections(dims))
        per_group = dims.heads // dims.kv_heads
        whole: list[TensorRange] = []
        for group in range(dims.kv_heads):
            whole.append(_heads(query, group * per_group, (group + 1) * per_group, dims))
            whole += (_heads(part, group, group + 1, dims) for part in (key, value))
        return cut(whole, *coords.tp.range(sum(part.stop - part.start for part in whole)))

    def _vllm_parts(self, dims: Dims, coords: ShardCoords) -> list[TensorRange]:
        query, key, value = located(self._projections(dims))
        if coords.tp.size <= dims.kv_heads:
            first, last = coords.tp.range(dims.kv_heads)
        else:
            first = coords.tp.rank // (coords.tp.size // dims.kv_heads)
            last = first + 1
        return [
            _heads(query, *coords.tp.range(dims.heads), dims),
            *(_heads(part, first, last, dims) for part in (key, value)),
        ]


def _heads(projection: TensorRange, first: int, last: int, dims: Dims) -> TensorRange:
    return projection.within(first * dims.head_dim, last * dims.head_dim)


@dataclass(frozen=True, kw_only=True)
class FusedGateUp:
    """The gate and the up-projection in one matrix: [gate shard; up shard].

    Args:
        gate, up: HF's projections; with one name, they are one tensor, the gate first.
    """

    gate: str
    up: str
    megatron: str
    vllm: str
    bias: bool = False

    def tensors(self, dims: Dims) -> dict[str, Shape]:
        return column_tensors(self._projections(dims), dims, self.bias)

    def stacks(self, engine: Engine, dims: Dims, coords: ShardCoords) -> Iterator[Stack]:
        shard = coords.tp.range(dims.ffn)
        parts = [part.within(*shard) for part in located(self._projections(dims))]
        yield from column_stacks(self.megatron if engine == "megatron" else self.vllm, parts, dims, self.bias)

    def _projections(self, dims: Dims) -> list[tuple[str, int]]:
        return [(self.gate, dims.ffn), (self.up, dims.ffn)]


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The experts of a layer: gated MLPs without biases.

    Megatron has a module per local expert, fused as in a dense model. vLLM has two parameters for all experts:
    [experts, gate shard; up shard, hidden] and [experts, hidden, channels of the shard].

    Args:
        gate, up, down: HF's matrices, with ``{}`` for the expert's index.
        vllm: the module of the two parameters.
    """

    gate: str
    up: str
    down: str
    vllm: str

    def tensors(self, dims: Dims) -> dict[str, Shape]:
        inner, outer = (dims.ffn, dims.hidden), (dims.hidden, dims.ffn)
        shapes = ((self.gate, inner), (self.up, inner), (self.down, outer))
        return {f"{name.format(e)}.weight": shape for e in range(dims.experts) for name, shape in shapes}

    def stacks(self, engine: Engine, dims: Dims, coords: ShardCoords) -> Iterator[Stack]:
        experts = range(*coords.ep.range(dims.experts))
        if engine == "megatron":
            for local, expert in enumerate(experts):
                module = MEGATRON_EXPERTS.format(local)
                yield self._in(f"{module}.linear_fc1.weight", expert, dims, coords)
                yield self._out(f"{module}.linear_fc2.weight", expert, dims, coords)
        else:
            of = (len(experts),)
            for i, expert in enumerate(experts):
                yield self._in(f"{self.vllm}.w13_weight", expert, dims, coords, (i,), of)
            for i, expert in enumerate(experts):
                yield self._out(f"{self.vllm}.w2_weight", expert, dims, coords, (i,), of)

    def _in(self, param: str, expert: int, dims: Dims, coords: ShardCoords, at: Shape = (), of: Shape = ()) -> Stack:
        start, stop = coords.tp.range(dims.ffn)
        names = (f"{name.format(expert)}.weight" for name in (self.gate, self.up))
        parts = tuple(TensorRange(tensor=name, start=start, stop=stop) for name in names)
        return Stack(param=param, shape=(2 * (stop - start), dims.hidden), parts=parts, at=at, of=of)

    def _out(self, param: str, expert: int, dims: Dims, coords: ShardCoords, at: Shape = (), of: Shape = ()) -> Stack:
        start, stop = coords.tp.range(dims.ffn)
        part = TensorRange(tensor=f"{self.down.format(expert)}.weight", start=start, stop=stop)
        return Stack(param=param, shape=(dims.hidden, stop - start), parts=(part,), axis=1, at=at, of=of)
