"""Low-rank adapters (LoRA): pairs of small matrices beside those of linear layers, for any TP and EP.

Hu et al. 2021 (arXiv 2106.09685): a matrix W [outputs, inputs] acts as W + scale * B A, with A
[rank, inputs] and B [outputs, rank]. Canonical tensors have the names of PEFT.

Where TP splits the outputs of W, it splits the rows of B, and all ranks have A; where it splits the
inputs, it splits the columns of A, and all ranks have B. So the product for a shard of W needs the
rank's own parts alone. The maps follow from the stacks of the matrices: an engine that stacks
canonical matrices, such as those of queries, keys and values, has the rows of their B in the same
order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megarl.models.dims import Dims, Engine
from megarl.models.expert_params import Experts
from megarl.models.hf_config import SCORE
from megarl.models.param_stacks import ShardCoords, Stack, TensorRange
from megarl.models.param_types import (
    ColumnParallel,
    DeltaNetParams,
    LatentDown,
    ParamType,
    RowParallel,
    SharedLinear,
)
from megarl.types import Layout
from megarl.weights.shard_map import ShardMap, TensorInfo

if TYPE_CHECKING:
    from megarl.models.architecture import ModelSpec

SCORE_WEIGHT = f"{SCORE.names.hf}.weight"
"""The scalar head, which is trained as a whole."""
_OF_HEADS = ("in_proj_a", "in_proj_b")
"""Linear layers of delta nets with an output for each head."""
ADAPTER = ".adapter."
"""In the local names of adapters' parameters alone."""
_LINEAR = (ColumnParallel, RowParallel, LatentDown, SharedLinear, DeltaNetParams, Experts)
"""Parameter types of linear layers, which may have adapters."""


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """The adapters of a model.

    Args:
        scale: factor of B A.
        targets: names of the linear layers that have adapters, such as ``q_proj``; None: all but the
            output layer and routers.
    """

    rank: int
    scale: float
    targets: tuple[str, ...] | None = None

    def has(self, module: str) -> bool:
        """Whether a linear layer of this canonical name has an adapter."""
        return self.targets is None or module.rpartition(".")[2] in self.targets


@dataclass(frozen=True, kw_only=True)
class AdaptedMatrix:
    """A matrix that an engine stacks of canonical ones, and the adapters of those.

    A has those of all canonical matrices one below the other, [n * rank, inputs], and B the rows of
    all, [outputs, rank], as the matrix has them. Where TP splits the inputs there is one matrix.

    Args:
        modules: canonical linear layers with an adapter, in the order of A.
        split: axis that TP splits; None: every rank has the whole matrix.
    """

    matrix: Stack
    modules: tuple[str, ...]
    split: int | None
    a: Stack
    b: Stack

    @property
    def owners(self) -> list[tuple[int, int | None]]:
        """Numbers of rows of B that follow one another, and the index of their module; None: without an adapter."""
        if self.matrix.axis == 1:
            return [(self.matrix.shape[0], 0)]
        found: list[tuple[int, int | None]] = []
        for part in self.matrix.parts:
            module = _module(part)
            found.append((part.size, self.modules.index(module) if module in self.modules else None))
        return found


def adapted_matrices(
    params: Iterable[ParamType], adapters: Adapters, engine: Engine, dims: Dims, coords: ShardCoords
) -> Iterator[AdaptedMatrix]:
    """Yields the matrices of parameters that have adapters."""
    unsplit = replace(coords, tp=1, tp_rank=0)
    for param in params:
        if not isinstance(param, _LINEAR):
            continue
        # A rank need not have rows of each of the canonical matrices.
        stacks = zip(
            param.stacks(engine, dims, coords),
            param.stacks(engine, dims, unsplit),
            strict=True,
        )
        for matrix, whole in stacks:
            modules = [module for module in dict.fromkeys(map(_module, whole.parts)) if adapters.has(module)]
            if len(matrix.shape) == 2 and matrix.param.endswith("weight") and modules:
                split = None if isinstance(param, LatentDown | SharedLinear) else matrix.axis
                yield _adapted(matrix, tuple(modules), split, adapters.rank)


def _adapted(
    matrix: Stack,
    modules: tuple[str, ...],
    split: int | None,
    rank: int,
) -> AdaptedMatrix:
    rows, columns = matrix.shape
    of_a = [TensorRange(f"{module}.lora_A.weight", 0, rank) for module in modules]
    of_b: list[TensorRange] = []
    if matrix.axis == 0:
        for part in matrix.parts:
            module = _module(part)
            of_b.append(part._replace(tensor=f"{module}.lora_B.weight" if module in modules else None))
    else:
        (part,) = matrix.parts
        of_a = [part._replace(tensor=of_a[0].tensor)]
        of_b = [TensorRange(f"{modules[0]}.lora_B.weight", 0, rows)]
    layer = local_module(matrix)
    above = replace(matrix, transposed=False, canonical_at=(), dtype=None)
    a = replace(
        above,
        param=f"{layer}{ADAPTER}a",
        shape=(len(modules) * rank, columns),
        parts=tuple(of_a),
    )
    b = replace(
        above,
        param=f"{layer}{ADAPTER}b",
        shape=(rows, rank),
        parts=tuple(of_b),
        axis=0,
    )
    return AdaptedMatrix(matrix=matrix, modules=modules, split=split, a=a, b=b)


def local_module(matrix: Stack) -> str:
    """Returns the name of an engine's module with a matrix."""
    return matrix.param.removesuffix(".weight")


def _module(part: TensorRange) -> str:
    """Returns the name of the canonical module of a range of a matrix."""
    assert part.tensor is not None, "a linear layer has no padding"
    return part.tensor.removesuffix(".weight")


def adaptable(spec: ModelSpec) -> set[str]:
    """Returns the names of linear layers that can have adapters."""
    every = Adapters(rank=1, scale=1.0)
    found: set[str] = set()
    for kind in spec.table.kinds:
        for adapted in adapted_matrices(kind.params, every, "megatron", spec.dims, ShardCoords()):
            found.update(module.rpartition(".")[2] for module in adapted.modules)
    return found


def unknown_targets(spec: ModelSpec, adapters: Adapters) -> list[str]:
    """Returns the targets that no linear layer of a model has for a name."""
    known = adaptable(spec)
    return [target for target in adapters.targets or () if target not in known]


def smallest_matrix(spec: ModelSpec, adapters: Adapters) -> tuple[str, int]:
    """Returns the name of a linear layer with an adapter, and its inputs or outputs, that are the fewest.

    Layers with an output for each head alone do not count among all linear layers.
    """
    sizes: dict[str, int] = {}
    for name, info in adapter_tensors(spec, adapters).items():
        module, _, side = name.removesuffix(".weight").rpartition(".")
        size = info.shape[1] if side == "lora_A" else info.shape[0]
        target = module.rpartition(".")[2]
        if adapters.targets is None and target in _OF_HEADS:
            continue
        sizes[target] = min(size, sizes.get(target, size))
    target = min(sizes, key=sizes.__getitem__)
    return target, sizes[target]


def adapter_tensors(spec: ModelSpec, adapters: Adapters) -> dict[str, TensorInfo]:
    """Returns the canonical tensors of a model's adapters."""
    shard_map = adapter_map(spec, adapters, Layout(), 0)
    tensors: dict[str, TensorInfo] = {}
    for shard in shard_map.shards:
        stop = shard.region.stop
        if shard.name in tensors:
            stop = tuple(map(max, stop, tensors[shard.name].shape))
        tensors[shard.name] = TensorInfo(stop, spec.dtype)
    return tensors


def with_head(
    tensors: Mapping[str, TensorInfo],
    model: Mapping[str, TensorInfo],
) -> dict[str, TensorInfo]:
    """Returns tensors of adapters with the scalar head of a model's tensors, if it has one."""
    return {**tensors, **{name: info for name, info in model.items() if name == SCORE_WEIGHT}}


def layer_adapters(
    spec: ModelSpec, adapters: Adapters, layout: Layout, rank: int
) -> Iterator[tuple[str, str, Sequence[AdaptedMatrix]]]:
    """Yields the adapters of each layer of a Megatron rank, with the layer's local and canonical prefix."""
    coords = spec.shard_coords(layout, rank)
    of_kind: dict[object, list[AdaptedMatrix]] = {}
    for kind in spec.table.kinds:
        of_kind[kind] = list(adapted_matrices(kind.params, adapters, "megatron", spec.dims, coords))
    for local, hf, kind in spec.local_layers(layout, rank):
        yield local, hf, of_kind[kind]


def adapter_map(spec: ModelSpec, adapters: Adapters, layout: Layout, rank: int) -> ShardMap:
    """Returns the map of a rank's adapters; parameters are named as in ``ModelSpec.megatron_map``."""
    groups: list[tuple[str, str, Sequence[Stack]]] = []
    for local, hf, matrices in layer_adapters(spec, adapters, layout, rank):
        stacks: list[Stack] = []
        for adapted in matrices:
            stacks += (adapted.a, adapted.b)
        groups.append((local, hf, stacks))
    return spec.map_of(groups)


def engine_adapter_map(spec: ModelSpec, adapters: Adapters, tp: int, rank: int) -> ShardMap:
    """Returns the map of a vLLM rank's adapters: those of each canonical matrix of a layer by its number.

    vLLM (0.32) has them in buffers beside its parameters, ``lora_a_stacked`` and ``lora_b_stacked``.
    """
    coords = ShardCoords(tp_rank=rank, tp=tp)
    of_kind: dict[object, list[Stack]] = {}
    for kind in spec.table.kinds:
        stacks: list[Stack] = []
        for adapted in adapted_matrices(kind.params, adapters, "vllm", spec.dims, coords):
            stacks += _by_number(adapted, adapters.rank)
        of_kind[kind] = stacks
    prefix = spec.table.layer_prefix
    groups: list[tuple[str, str, Sequence[Stack]]] = []
    for layer, kind in enumerate(spec.table.layers):
        groups.append((prefix.of("vllm").format(layer), prefix.hf.format(layer), of_kind[kind]))
    return spec.map_of(groups)


def _by_number(adapted: AdaptedMatrix, rank: int) -> Iterator[Stack]:
    """Yields A and B of each canonical matrix of a matrix of vLLM's."""
    layer = local_module(adapted.matrix)
    numbers = {module: number for number, module in enumerate(dict.fromkeys(map(_module, adapted.matrix.parts)))}
    for module in adapted.modules:
        a = f"{module}.lora_A.weight"
        b = f"{module}.lora_B.weight"
        of_a = tuple(part for part in adapted.a.parts if part.tensor == a)
        of_b = tuple(part for part in adapted.b.parts if part.tensor == b)
        name = f"{layer}{ADAPTER}{numbers[module]}"
        columns = adapted.a.shape[1]
        rows = sum(part.size for part in of_b)
        yield replace(
            adapted.a,
            param=f"{name}.a",
            shape=(rank, columns),
            parts=of_a,
        )
        yield replace(
            adapted.b,
            param=f"{name}.b",
            shape=(rows, rank),
            parts=of_b,
        )


def engine_maps(spec: ModelSpec, tp: int, adapters: Adapters | None = None) -> list[ShardMap]:
    """Returns the shard map of each tensor-parallel rank of an engine, in vLLM's names."""
    maps: list[ShardMap] = []
    for rank in range(tp):
        shard_map = spec.vllm_map(tp, rank)
        if adapters is not None:
            shard_map = shard_map.joined(engine_adapter_map(spec, adapters, tp, rank))
        maps.append(shard_map)
    return maps


def engines_apply_adapters(spec: ModelSpec) -> bool:
    """Returns whether vLLM's engines apply adapters of a model: one of dense layers with the usual attention."""
    if not spec.family.engine_adapters or spec.dims.mla is not None:
        return False
    for kind in spec.table.kinds:
        for param in kind.params:
            if isinstance(param, _LINEAR) and not isinstance(param, ColumnParallel | RowParallel):
                return False
    return not spec.dims.experts
