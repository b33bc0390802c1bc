"""Parameter types of attention and experts: queries with keys and values, and the MLPs of experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megarl.models.param_types import (
    Dims,
    Engine,
    ShardCoords,
    Stack,
    TensorRange,
    column_stacks,
    column_tensors,
    projection_ranges,
)
from megarl.weights.shard_map import Shape

MEGATRON_EXPERTS = "mlp.experts.local_experts.{}"
"""Megatron's module of an expert, by its local index."""


@dataclass(frozen=True, kw_only=True)
class FusedQKV:
    """The query, key and value projections in one matrix.

    Megatron stacks [query heads of the group; key; value] per KV group; TP splits these rows, and
    cuts groups where it exceeds their number. vLLM stacks [query; key; value] of the rank's heads;
    where TP exceeds the KV heads, neighboring ranks hold the same one.

    Args:
        hf: names of queries, keys and values; those of one name are concatenated in one tensor.
        transposed: whether HF stores [hidden, rows].
    """

    hf: tuple[str, str, str]
    megatron: str
    vllm: str
    bias: bool = False
    transposed: bool = False

    def tensors(self, dims: Dims) -> dict[str, Shape]:
        return column_tensors(self._projections(dims), dims, self.bias, self.transposed)

    def stacks(self, engine: Engine, dims: Dims, coords: ShardCoords) -> Iterator[Stack]:
        if engine == "megatron":
            name = self.megatron
            parts = self._megatron_parts(dims, coords)
        else:
            name = self.vllm
            parts = self._vllm_parts(dims, coords)
        yield from column_stacks(name, parts, dims, self.bias, self.transposed)

    def _projections(self, dims: Dims) -> list[tuple[str, int]]:
        kv = dims.kv_heads * dims.head_dim
        return list(zip(self.hf, (dims.size("attention"), kv, kv), strict=True))

    def _megatron_parts(self, dims: Dims, coords: ShardCoords) -> list[TensorRange]:
        query, key, value = projection_ranges(self._projections(dims))
        per_group = dims.heads // dims.kv_heads
        whole: list[TensorRange] = []
        for group in range(dims.kv_heads):
            whole.append(_heads(query, group * per_group, (group + 1) * per_group, dims))
            whole.append(_heads(key, group, group + 1, dims))
            whole.append(_heads(value, group, group + 1, dims))
        start, stop = coords.tp.range(sum(part.size for part in whole))
        return _slice(whole, start, stop)

    def _vllm_parts(self, dims: Dims, coords: ShardCoords) -> list[TensorRange]:
        query, key, value = projection_ranges(self._projections(dims))
        if coords.tp.size <= dims.kv_heads:
            first, last = coords.tp.range(dims.kv_heads)
        else:
            first = coords.tp.rank // (coords.tp.size // dims.kv_heads)
            last = first + 1
        queries = _heads(query, *coords.tp.range(dims.heads), dims)
        return [queries, _heads(key, first, last, dims), _heads(value, first, last, dims)]


def _heads(projection: TensorRange, first: int, last: int, dims: Dims) -> TensorRange:
    return projection.within(first * dims.head_dim, last * dims.head_dim)


def _slice(parts: Sequence[TensorRange], start: int, stop: int) -> list[TensorRange]:
    """Returns indices [start, stop) of stacked ranges."""
    found: list[TensorRange] = []
    offset = 0
    for part in parts:
        low = max(start - offset, 0)
        high = min(stop - offset, part.size)
        if low < high:
            found.append(part.within(low, high))
        offset += part.size
    return found


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The experts of a layer: gated MLPs without biases.

    Megatron has a module per local expert, fused as in a dense model. vLLM has two parameters for
    all experts: [experts, gate shard; up shard, hidden] and [experts, hidden, channels of the
    shard].

    Args:
        module: HF's module of all experts; vLLM's parameters are in ``routed_experts`` of it.
        gate, up, down: HF's matrices of an expert.
    """

    module: str
    gate: str
    up: str
    down: str

    def tensors(self, dims: Dims) -> dict[str, Shape]:
        tensors: dict[str, Shape] = {}
        for expert in range(dims.experts):
            tensors[self._tensor(expert, self.gate)] = (dims.ffn, dims.hidden)
            tensors[self._tensor(expert, self.up)] = (dims.ffn, dims.hidden)
            tensors[self._tensor(expert, self.down)] = (dims.hidden, dims.ffn)
        return tensors

    def stacks(self, engine: Engine, dims: Dims, coords: ShardCoords) -> Iterator[Stack]:
        experts = range(*coords.ep.range(dims.experts))
        if engine == "megatron":
            for local, expert in enumerate(experts):
                module = MEGATRON_EXPERTS.format(local)
                yield self._gate_up(f"{module}.linear_fc1.weight", expert, dims, coords)
                yield self._down(f"{module}.linear_fc2.weight", expert, dims, coords)
        else:
            of = (len(experts),)
            vllm = f"{self.module}.routed_experts"
            for i, expert in enumerate(experts):
                yield self._gate_up(f"{vllm}.w13_weight", expert, dims, coords, (i,), of)
            for i, expert in enumerate(experts):
                yield self._down(f"{vllm}.w2_weight", expert, dims, coords, (i,), of)

    def _tensor(self, expert: int, name: str) -> str:
        return f"{self.module}.{expert}.{name}.weight"

    def _gate_up(
        self, param: str, expert: int, dims: Dims, coords: ShardCoords, at: Shape = (), of: Shape = ()
    ) -> Stack:
        start, stop = coords.tp.range(dims.ffn)
        gate = TensorRange(self._tensor(expert, self.gate), start, stop)
        up = TensorRange(self._tensor(expert, self.up), start, stop)
        shape = (gate.size + up.size, dims.hidden)
        return Stack(param=param, shape=shape, parts=(gate, up), at=at, of=of)

    def _down(self, param: str, expert: int, dims: Dims, coords: ShardCoords, at: Shape = (), of: Shape = ()) -> Stack:
        part = TensorRange(self._tensor(expert, self.down), *coords.tp.range(dims.ffn))
        shape = (dims.hidden, part.size)
        return Stack(param=param, shape=shape, parts=(part,), axis=1, at=at, of=of)
