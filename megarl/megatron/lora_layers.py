"""Low-rank adapters in Megatron's linear layers, and matrices with their adapters merged into them.

A linear layer keeps its class. Its adapter is a module in it, whose output a forward hook adds. Under
TP and sequence parallelism only the products with A are exchanged, [tokens, rank].
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.data.stream import stable_hash
from megarl.megatron.experts import ExpertLinear, grouped_product
from megarl.megatron.model import RoleModel, ScalarHead
from megarl.models.architecture import ModelSpec
from megarl.models.lora import AdaptedMatrix, Adapters, layer_adapters, local_module
from megarl.types import Layout
from megarl.weights.plan import Boxed
from megarl.weights.shard_map import ShardMap, TensorInfo

_ROWS = 128
"""Rows of a matrix that are merged at once: few, as heads of queries, keys and values are boxes of their own."""


@dataclass(kw_only=True)
class AdapterSwitch:
    """Whether the adapters of a model take part in its passes."""

    on: bool = True


class Adapter(torch.nn.Module):
    """The adapters of a linear layer on a rank, see ``AdaptedMatrix``; with experts, [experts, ...].

    Where a matrix is stacked of several, such as those of queries, keys and values, one product with
    all A and one with all B are computed: each row of B stands among zeros, at the place of its A.

    Args:
        split: axis of the layer's matrix that TP splits; None: all ranks have it whole.
    """

    def __init__(
        self,
        matrices: Sequence[AdaptedMatrix],
        scale: float,
        weight: Any,
        config: TransformerConfig,
        tp: dist.ProcessGroup,
    ) -> None:
        super().__init__()
        adapted = matrices[0]
        self.scale = scale
        self.split = adapted.split
        self._tp = tp
        self._scattered = config.sequence_parallel
        self._is_expert = bool(adapted.matrix.of)
        self.a = self._parameter(adapted.matrix.of + adapted.a.shape, weight)
        self.b = self._parameter(adapted.matrix.of + adapted.b.shape, weight)
        if self.split == 0:
            set_tensor_model_parallel_attributes(self.b, True, len(adapted.matrix.of), 1)
        elif self.split == 1:
            set_tensor_model_parallel_attributes(self.a, True, len(adapted.matrix.of) + 1, 1)
        if not self._is_expert and self._scattered:
            # They see a part of the tokens: Megatron sums their gradients over TP.
            self.a.sequence_parallel = self.split != 1
            self.b.sequence_parallel = self.split != 0
        mask = _mask(adapted)
        if mask is not None:
            mask = mask.to(self.b.device, self.b.dtype)
        self.mask: Any
        self.register_buffer("mask", mask, persistent=False)

    def _parameter(self, shape: tuple[int, ...], weight: Any) -> Any:
        parameter: Any = torch.nn.Parameter(torch.zeros(shape, dtype=weight.dtype, device=weight.device))
        parameter.allreduce = getattr(weight, "allreduce", True)
        return parameter

    def forward(self, x: Tensor, *groups: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]; with experts, ``groups`` are those of ``ExpertLinear``."""
        if self._is_expert:
            # Every TP rank has all tokens, and a part of their gradients.
            a = copy_to_tensor_model_parallel_region(self.a, self._tp) if self.split == 0 else self.a
            b = copy_to_tensor_model_parallel_region(self.b, self._tp) if self.split == 1 else self.b
            inner = grouped_product(x, a, *groups) * self.scale
            return grouped_product(inner, self.block(b), *groups)
        inner = F.linear(x, self.a) * self.scale
        if self.split == 0 and self._scattered:
            inner = gather_from_sequence_parallel_region(inner, group=self._tp)
        elif self.split == 0:
            inner = copy_to_tensor_model_parallel_region(inner, self._tp)
        elif self.split == 1 and self._scattered:
            inner = reduce_scatter_to_sequence_parallel_region(inner, group=self._tp)
        elif self.split == 1:
            inner = reduce_from_tensor_model_parallel_region(inner, self._tp)
        return F.linear(inner, self.block(self.b))

    def block(self, b: Tensor) -> Tensor:
        """Returns rows of B among zeros, [..., rows, n * rank]: each has its place where its own A is."""
        if self.mask is None:
            return b
        repeats = self.mask.shape[-1] // b.shape[-1]
        return torch.cat([b] * repeats, dim=-1) * self.mask


def _mask(adapted: AdaptedMatrix) -> Tensor | None:
    """Returns [rows, n * rank], 1 where a row of B has its place; None where it fills all of it."""
    owners = adapted.owners
    rank = adapted.b.shape[1]
    if len(adapted.modules) == 1 and all(owner is not None for _, owner in owners):
        return None
    mask = torch.zeros(adapted.b.shape[0], len(adapted.modules) * rank)
    row = 0
    for rows, owner in owners:
        if owner is not None:
            mask[row : row + rows, owner * rank : (owner + 1) * rank] = 1
        row += rows
    return mask


def add_adapters(
    model: RoleModel,
    spec: ModelSpec,
    adapters: Adapters,
    layout: Layout,
    rank: int,
) -> AdapterSwitch:
    """Adds adapters of zeros to the chunks of a rank, and freezes all else but a scalar head.

    Layers that are computed again for the backward pass get no gradient of their adapters if none of
    their inputs has one: then the embeddings have gradients, too.

    Returns the switch of the adapters.
    """
    switch = AdapterSwitch()
    chunks = model.chunks
    groups = model.groups
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad_(
                name.startswith("output_layer.") and isinstance(chunk.output_layer, ScalarHead),
            )
        chunk.embeds_constants = model.config.recompute_granularity is not None

    def added(layer: Any, inputs: tuple[Tensor, ...], output: Any) -> Any:
        if not switch.on:
            return output
        if isinstance(output, tuple):
            result, bias = output
            return result + layer.adapter(*inputs), bias
        return output + layer.adapter(*inputs)

    for local, _, matrices in layer_adapters(spec, adapters, layout, rank):
        by_layer: dict[str, list[AdaptedMatrix]] = defaultdict(list)
        for adapted in matrices:
            by_layer[local_module(adapted.matrix)].append(adapted)
        chunk, prefix = local.split(":")
        for name, its_matrices in by_layer.items():
            layer: Any = chunks[int(chunk)].get_submodule(prefix + name)
            tp = groups.expt_tp if isinstance(layer, ExpertLinear) else groups.tp
            layer.adapter = Adapter(its_matrices, adapters.scale, layer.weight, model.config, tp)
            # Before the hook of a norm after the layer.
            layer.register_forward_hook(added, prepend=True)
    return switch


@dataclass(frozen=True, kw_only=True)
class MergedMatrix:
    """A matrix W + scale * B A that is computed box by box, in float32 and rounded once.

    An element does not depend on the box: products are of whole rows, always the same ones together.

    Args:
        weight: [..., outputs, inputs], this rank's part of W.
    """

    weight: Tensor
    adapter: Adapter

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    @torch.no_grad()
    def __getitem__(self, box: tuple[slice, ...]) -> Tensor:
        *above, rows, columns = box
        merged = self.weight[box].to(torch.float32, copy=True)
        a = self.adapter.a[tuple(above)].float()
        b = self.adapter.block(self.adapter.b[tuple(above)]).float()
        for index in product(*map(range, merged.shape[:-2])):
            for start in range(rows.start // _ROWS * _ROWS, rows.stop, _ROWS):
                own = slice(max(start, rows.start), min(start + _ROWS, rows.stop))
                change = self.adapter.scale * (b[index][start : start + _ROWS] @ a[index])
                target = merged[index][own.start - rows.start : own.stop - rows.start]
                target += change[own.start - start : own.stop - start, columns]
        return merged.to(self.weight.dtype)


def merged_weights(model: RoleModel) -> dict[str, Boxed]:
    """Returns the weights of a ``RoleModel`` by shard-map name, with their adapters merged where they have some."""
    weights: dict[str, Boxed] = {}
    for name, parameter in model.parameters().items():
        weights[name] = parameter.data
    for index, chunk in enumerate(model.chunks):
        module: Any
        for name, module in chunk.named_modules():
            adapter = getattr(module, "adapter", None)
            if isinstance(adapter, Adapter):
                weight = f"{index}:{name}.weight"
                weights[weight] = MergedMatrix(weight=module.weight.data, adapter=adapter)
    return weights


@dataclass(frozen=True, kw_only=True)
class ScaledMatrix:
    """A matrix B times the scale of its adapter, as vLLM has it."""

    b: Tensor
    scale: float

    @property
    def shape(self) -> torch.Size:
        return self.b.shape

    def __getitem__(self, box: tuple[slice, ...]) -> Tensor:
        return self.b[box] * self.scale


def separate_weights(model: RoleModel) -> dict[str, Boxed]:
    """Returns the weights and the adapters of a ``RoleModel`` by shard-map name, as engines apply them."""
    weights: dict[str, Boxed] = {}
    for name, parameter in model.parameters().items():
        weights[name] = parameter.data
    for index, chunk in enumerate(model.chunks):
        for name, module in chunk.named_modules():
            if isinstance(module, Adapter):
                weights[f"{index}:{name}.a"] = module.a.data
                weights[f"{index}:{name}.b"] = ScaledMatrix(b=module.b.data, scale=module.scale)
    return weights


def initial_adapters(
    shard_map: ShardMap, tensors: Mapping[str, TensorInfo], *, gaussian: bool, seed: int
) -> dict[str, Tensor]:
    """Returns a rank's new adapters, the same for every layout: random A, and B of zeros, as in PEFT.

    Args:
        shard_map: map of the rank's adapters.
        tensors: canonical tensors of all adapters.
        gaussian: whether A is normal with deviation 1 / rank, in place of uniform up to 1 / sqrt(inputs).
    """
    local = {name: torch.zeros(info.shape, dtype=getattr(torch, info.dtype)) for name, info in shard_map.params.items()}
    for shard in shard_map.shards:
        if not shard.name.endswith("lora_A.weight"):
            continue
        rank, inputs = tensors[shard.name].shape
        generator = torch.Generator().manual_seed(stable_hash(seed, shard.name))
        if gaussian:
            whole = torch.randn(rank, inputs, generator=generator) / rank
        else:
            whole = (2 * torch.rand(rank, inputs, generator=generator) - 1) / inputs**0.5
        target = local[shard.param][shard.box.slices]
        target.copy_(whole[shard.region.slices].view(target.shape))
    return local
