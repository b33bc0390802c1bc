"""Parameter types: how Megatron and vLLM store groups of canonical tensors, for any TP and EP.

Every local parameter is a stack: ranges of canonical tensors concatenated along one axis, maybe
below leading axes. A parameter type says which ranges each engine stacks; the shard maps of both
engines follow from that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from megarl.models.dims import DeltaDims, Dims, Engine, Size
from megarl.models.expert_params import Experts, StackedExperts
from megarl.models.param_stacks import Names, ShardCoords, Stack, TensorRange
from megarl.weights.shard_map import Shape


@dataclass(frozen=True, kw_only=True)
class Replicated:
    """A weight, and maybe a bias of its shape, whole on every TP rank, such as a norm or a router.

    Args:
        bare: whether names are those of the parameter, not of its module.
        dtype: dtype in files and in Megatron, if it is not the model's.
        vllm_dtype: dtype in vLLM, likewise.
    """

    names: Names
    shape: tuple[Size, ...] = ("hidden",)
    bias: bool = False
    bare: bool = False
    dtype: str | None = None
    vllm_dtype: str | None = None

    def stacks(self, engine: Engine, dims: Dims, coords: ShardCoords) -> Iterator[Stack]:
        shape = tuple(map(dims.size, self.shape))
        dtype = self.dtype if engine == "megatron" else self.vllm_dtype
        suffixes = [f".{kind}" for kind in _kinds(self.bias)]
        if self.bare:
            suffixes = [""]
        for suffix in suffixes:
            yield Stack(
                param=self.names.of(engine) + suffix,
                shape=shape,
                parts=(TensorRange(self.names.hf + suffix, 0, shape[0]),),
                dtype=dtype,
            )


@dataclass(frozen=True, kw_only=True)
class SharedLinear(Replicated):
    """A linear layer that is whole on every TP rank, and no router."""


@dataclass(frozen=True)
class HeadVector:
    """A number of each attention head, such as a sink; TP splits the heads."""

    names: Names

    def stacks(self, engine: Engine, dims: Dims, coords: ShardCoords) -> Iterator[Stack]:
        part = TensorRange(self.names.hf, *coords.tp_range(dims.heads))
        yield Stack(param=self.names.of(engine), shape=(part.size,), parts=(part,))


@dataclass(frozen=True, kw_only=True)
class LatentDown:
    """Projections to latents, of queries and of keys and values, whole on every rank; vLLM stacks them."""

    queries: Names
    latent: Names
    vllm: str

    def stacks(self, engine: Engine, dims: Dims, coords: ShardCoords) -> Iterator[Stack]:
        sizes: tuple[tuple[Names, Size], ...] = (
            (self.queries, "latent_queries"),
            (self.latent, "latent_and_rotated"),
        )
        parts: list[TensorRange] = []
        for names, size in sizes:
            part = TensorRange(f"{names.hf}.weight", 0, dims.size(size))
            parts.append(part)
            if engine == "megatron":
                yield Stack(param=f"{names.megatron}.weight", shape=(part.size, dims.hidden), parts=(part,))
        if engine == "vllm":
            rows = sum(part.size for part in parts)
            yield Stack(param=f"{self.vllm}.weight", shape=(rows, dims.hidden), parts=tuple(parts))


@dataclass(frozen=True, kw_only=True)
class VocabRows:
    """A [vocabulary, hidden] matrix split by rows and padded."""

    names: Names

    def stacks(self, engine: Engine, dims: Dims, coords: ShardCoords) -> Iterator[Stack]:
        start, stop = coords.tp_range(coords.vocab_rows or dims.padded_vocab(engine, coords.tp))
        known = max(start, min(stop, dims.vocab))
        parts: list[TensorRange] = []
        if start < known:
            parts.append(TensorRange(f"{self.names.hf}.weight", start, known))
        if known < stop:
            parts.append(TensorRange(None, known, stop))
        param = f"{self.names.of(engine)}.weight"
        yield Stack(param=param, shape=(stop - start, dims.hidden), parts=tuple(parts))


@dataclass(frozen=True, kw_only=True)
class ColumnParallel:
    """[channels, hidden] matrices, and maybe biases, whose outputs TP splits, stacked.

    Args:
        hf: name of each matrix; those of one name are concatenated in one tensor.
        transposed: whether HF stores [hidden, rows].
        outputs: number of channels.
        inputs: elements of what they multiply.
    """

    hf: tuple[str, ...]
    megatron: str
    vllm: str
    bias: bool = False
    transposed: bool = False
    outputs: Size = "ffn"
    inputs: Size = "hidden"

    def stacks(self, engine: Engine, dims: Dims, coords: ShardCoords) -> Iterator[Stack]:
        name = self.megatron if engine == "megatron" else self.vllm
        parts = self._parts(engine, dims, coords)
        rows = sum(part.size for part in parts)
        shapes: dict[str, Shape] = {"weight": (rows, dims.size(self.inputs)), "bias": (rows,)}
        for kind in _kinds(self.bias):
            named = tuple(part._replace(tensor=f"{part.tensor}.{kind}") for part in parts)
            swapped = self.transposed and kind == "weight"
            yield Stack(param=f"{name}.{kind}", shape=shapes[kind], parts=named, transposed=swapped)

    def _parts(self, _engine: Engine, dims: Dims, coords: ShardCoords) -> list[TensorRange]:
        """Returns the rows of the matrices that a rank of an engine stacks."""
        channels = dims.size(self.outputs)
        shard = coords.tp_range(channels)
        return [matrix.within(*shard) for matrix in self._matrices([channels] * len(self.hf))]

    def _matrices(self, rows: Sequence[int]) -> list[TensorRange]:
        """Returns the range of each matrix in its canonical tensor."""
        stops: dict[str, int] = defaultdict(int)
        matrices: list[TensorRange] = []
        for name, n in zip(self.hf, rows, strict=True):
            start = stops[name]
            stops[name] += n
            matrices.append(TensorRange(name, start, start + n))
        return matrices


@dataclass(frozen=True, kw_only=True)
class RowParallel:
    """A [hidden, width] matrix, in HF maybe transposed, whose inputs TP splits, and maybe a whole bias."""

    names: Names
    inputs: Size
    bias: bool = False
    transposed: bool = False

    def stacks(self, engine: Engine, dims: Dims, coords: ShardCoords) -> Iterator[Stack]:
        hf = self.names.hf
        local = self.names.of(engine)
        columns = TensorRange(f"{hf}.weight", *coords.tp_range(dims.size(self.inputs)))
        yield Stack(
            param=f"{local}.weight",
            shape=(dims.hidden, columns.size),
            parts=(columns,),
            axis=1,
            transposed=self.transposed,
        )
        if self.bias:
            whole = TensorRange(f"{hf}.bias", 0, dims.hidden)
            yield Stack(param=f"{local}.bias", shape=(dims.hidden,), parts=(whole,))


def canonical_dtypes(param_types: Iterable[ParamType], dims: Dims) -> dict[str, str]:
    """Returns the dtypes of canonical tensors that do not have the model's."""
    found: dict[str, str] = {}
    for param_type in param_types:
        for stack in param_type.stacks("megatron", dims, ShardCoords()):
            for part in stack.parts:
                if stack.dtype is not None and part.tensor is not None:
                    found[part.tensor] = stack.dtype
    return found


def canonical_shapes(param_types: Iterable[ParamType], dims: Dims) -> dict[str, Shape]:
    """Returns the shapes of canonical tensors: module by module, each in the order of its first tensor."""
    dims = replace(dims, rows=None)
    modules: dict[str, dict[str, Shape]] = defaultdict(dict)
    for param_type in param_types:
        for stack in param_type.stacks("megatron", dims, ShardCoords()):
            for _, tensor, region in stack.boxes:
                if tensor is not None:
                    shapes = modules[tensor.rpartition(".")[0]]
                    shapes[tensor] = tuple(map(max, region.stop, shapes.get(tensor, region.stop)))
    canonical: dict[str, Shape] = {}
    for shapes in modules.values():
        canonical |= shapes
    return canonical


def _kinds(bias: bool) -> tuple[str, ...]:
    return ("weight", "bias") if bias else ("weight",)


@dataclass(frozen=True, kw_only=True)
class FusedQKV(ColumnParallel):
    """The query, key and value projections in one matrix; ``hf`` names the three.

    Megatron stacks [query heads of the group; their gates; key; value] per KV group; TP splits these
    rows, and cuts groups where it exceeds their number. vLLM stacks [query; key; value] of the rank's
    heads; where TP exceeds the KV heads, neighboring ranks hold the same one.

    Args:
        gated: whether each query head is followed by the gate of its output, in HF and vLLM.
    """

    gated: bool = False

    def _parts(self, engine: Engine, dims: Dims, coords: ShardCoords) -> list[TensorRange]:
        kv = dims.kv_heads * dims.head_dim
        width = 1 + self.gated
        query, key, value = self._matrices([width * dims.size("attention"), kv, kv])
        if engine == "megatron":
            whole: list[TensorRange] = []
            for group in range(dims.kv_heads):
                whole += self._queries(query, group, dims)
                whole.append(_heads(key, group, group + 1, dims))
                whole.append(_heads(value, group, group + 1, dims))
            start, stop = coords.tp_range(sum(part.size for part in whole))
            return _slice(whole, start, stop)
        if coords.tp <= dims.kv_heads:
            first, last = coords.tp_range(dims.kv_heads)
        else:
            first = coords.tp_rank // (coords.tp // dims.kv_heads)
            last = first + 1
        queries = _heads(query, *coords.tp_range(width * dims.heads), dims)
        return [queries, _heads(key, first, last, dims), _heads(value, first, last, dims)]

    def _queries(self, query: TensorRange, group: int, dims: Dims) -> list[TensorRange]:
        """Returns the rows of a KV group's queries and gates, as Megatron stacks them."""
        per_group = dims.heads // dims.kv_heads
        heads = range(group * per_group, (group + 1) * per_group)
        if not self.gated:
            return [_heads(query, heads.start, heads.stop, dims)]
        queries = [_heads(query, 2 * head, 2 * head + 1, dims) for head in heads]
        gates = [_heads(query, 2 * head + 1, 2 * head + 2, dims) for head in heads]
        return [*queries, *gates]


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


@dataclass(frozen=True)
class DeltaNetParams:
    """The parameters of a gated delta net.

    Rows of projections are of queries, keys, values, output gates z, strengths b and decays a, in
    this order. Megatron has one matrix of all, vLLM one of the first four and one of the last two.
    The convolution is [channels of queries, keys and values, 1, width].

    Args:
        interleaved: whether HF and vLLM have two matrices, with the rows of a key head and of its
            value heads together.
    """

    hf: str = "linear_attn"
    megatron: str = "self_attention"
    interleaved: bool = False

    def stacks(self, engine: Engine, dims: Dims, coords: ShardCoords) -> Iterator[Stack]:
        delta = dims.delta
        assert delta is not None
        local, norm = self.hf, "norm"
        if engine == "megatron":
            local, norm = self.megatron, "out_norm"
        for name, parts in self._projections(engine, delta, coords).items():
            rows = sum(part.size for part in parts)
            yield Stack(
                param=f"{local}.{name}.weight",
                shape=(rows, dims.hidden),
                parts=parts,
            )
        values = coords.tp_range(delta.value_heads * delta.value_dim)
        heads = coords.tp_range(delta.value_heads)
        convolved = self._mixed("conv1d", delta, coords)
        shape = (sum(part.size for part in convolved), 1, delta.width)
        yield Stack(
            param=f"{local}.conv1d.weight",
            shape=shape,
            parts=convolved,
        )
        for name in ("dt_bias", "A_log"):
            part = TensorRange(f"{self.hf}.{name}", *heads)
            dtype = "float32" if (engine, name) == ("vllm", "A_log") else None
            yield Stack(
                param=f"{local}.{name}",
                shape=(part.size,),
                parts=(part,),
                dtype=dtype,
            )
        part = TensorRange(f"{self.hf}.norm.weight", 0, delta.value_dim)
        yield Stack(
            param=f"{local}.{norm}.weight",
            shape=(part.size,),
            parts=(part,),
        )
        part = TensorRange(f"{self.hf}.out_proj.weight", *values)
        shape = (dims.hidden, part.size)
        yield Stack(
            param=f"{local}.out_proj.weight",
            shape=shape,
            parts=(part,),
            axis=1,
        )

    def _projections(self, engine: Engine, delta: DeltaDims, coords: ShardCoords) -> dict[str, tuple[TensorRange, ...]]:
        """Returns the rows of each matrix of a rank's projections."""
        if self.interleaved:
            return self._interleaved(engine, delta, coords)
        mixed = self._mixed("in_proj_qkv", delta, coords)
        z = TensorRange(f"{self.hf}.in_proj_z.weight", *coords.tp_range(delta.value_heads * delta.value_dim))
        b = TensorRange(f"{self.hf}.in_proj_b.weight", *coords.tp_range(delta.value_heads))
        a = TensorRange(f"{self.hf}.in_proj_a.weight", *coords.tp_range(delta.value_heads))
        if engine == "megatron":
            return {"in_proj": (*mixed, z, b, a)}
        return {"in_proj_qkvz": (*mixed, z), "in_proj_ba": (b, a)}

    def _interleaved(self, engine: Engine, delta: DeltaDims, coords: ShardCoords) -> dict[str, tuple[TensorRange, ...]]:
        shared = delta.value_heads // delta.key_heads
        values = shared * delta.value_dim
        sizes = {
            "in_proj_qkvz": (delta.key_dim, delta.key_dim, values, values),
            "in_proj_ba": (shared, shared),
        }
        first, last = coords.tp_range(delta.key_heads)
        own: list[TensorRange] = []
        whole: dict[str, tuple[TensorRange, ...]] = {}
        for name, of_head in sizes.items():
            tensor = f"{self.hf}.{name}.weight"
            rows = sum(of_head)
            whole[name] = (TensorRange(tensor, first * rows, last * rows),)
            start = 0
            for size in of_head:
                for head in range(first, last):
                    own.append(TensorRange(tensor, head * rows + start, head * rows + start + size))
                start += size
        if engine == "megatron":
            return {"in_proj": tuple(own)}
        return whole

    def _mixed(self, module: str, delta: DeltaDims, coords: ShardCoords) -> tuple[TensorRange, ...]:
        """Returns a rank's channels of queries, keys and values.

        They follow one another in HF's tensor.
        """
        name = f"{self.hf}.{module}.weight"
        keys = delta.key_heads * delta.key_dim
        start, stop = coords.tp_range(keys)
        first, last = coords.tp_range(delta.value_heads * delta.value_dim)
        return (
            TensorRange(name, start, stop),
            TensorRange(name, keys + start, keys + stop),
            TensorRange(name, 2 * keys + first, 2 * keys + last),
        )


ParamType = (
    Replicated
    | HeadVector
    | VocabRows
    | LatentDown
    | ColumnParallel
    | RowParallel
    | FusedQKV
    | Experts
    | StackedExperts
    | DeltaNetParams
)
"""A group of canonical tensors that the engines store together; names have no layer prefix.

``stacks`` yields the parameters in which one rank of an engine holds them.
"""
