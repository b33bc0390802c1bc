"""From stacks to shard maps: a holder's, and that of a Megatron checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from megarl.models.fused_params import MEGATRON_EXPERTS
from megarl.models.param_types import Stack
from megarl.weights.shard_map import Box, Padding, Shape, Shard, ShardMap, TensorInfo

_EXPERT = re.compile(re.escape(MEGATRON_EXPERTS).replace(r"\{\}", r"(\d+)"))
_INPUT_NORM = ("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
_MLP_NORM = ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")


@dataclass(frozen=True, slots=True)
class Laid:
    """A stack with its boxes worked out, which many layers may share.

    Args:
        param: its parameter.
        shape: of that.
        parts: of each part, the box in the parameter, the canonical tensor (None: a padding), and the box in that.
        transposed: as in ``Stack``.
    """

    param: str
    shape: Shape
    parts: tuple[tuple[Box, str | None, Box], ...]
    transposed: bool

    @classmethod
    def of(cls, stack: Stack) -> Laid:
        parts = tuple(_parts(stack))
        return cls(param=stack.param, shape=stack.of + stack.shape, parts=parts, transposed=stack.transposed)


Prefixed = tuple[str, str, Sequence[Laid]]
"""Stacks with the prefixes of their local and their canonical names."""


def build_shard_map(groups: Iterable[Prefixed], dtype: str) -> ShardMap:
    """The map of a holder that has these stacks."""
    params: dict[str, TensorInfo] = {}
    shards: list[Shard] = []
    padding: list[Padding] = []
    for local, hf, stacks in groups:
        for stack in stacks:
            param = local + stack.param
            params[param] = TensorInfo(stack.shape, dtype)
            for box, tensor, region in stack.parts:
                if tensor is None:
                    padding.append(Padding(param=param, box=box))
                else:
                    named = Shard(param=param, box=box, name=hf + tensor, region=region, transposed=stack.transposed)
                    shards.append(named)
    return ShardMap(params=params, shards=tuple(shards), padding=tuple(padding))


def in_checkpoint(stack: Stack, layer: int, layers: int, *, experts: int, norm_in_mlp: bool) -> Stack:
    """A layer's stack as Megatron's distributed checkpoints have it (megatron-core 0.16.1).

    Layers are a leading axis (TransformerBlock.sharded_state_dict), and below it experts (SequentialMLP's). Norms go by
    the names that they have where Transformer Engine fuses them into the linear layer that follows
    (``sharded_state_dict_keys_map`` of models/gpt/gpt_layer_specs.py).

    Args:
        stack: as one rank alone holds it.
        experts: per layer; 0 in a dense model.
        norm_in_mlp: the norm before the MLP is fused too.
    """
    param, at, of = stack.param, (layer, *stack.at), (layers, *stack.of)
    for own, fused in (_INPUT_NORM, _MLP_NORM)[: 2 if norm_in_mlp else 1]:
        if param.startswith(own):
            param = fused + param.removeprefix(own)
    expert = _EXPERT.match(param)
    if expert:
        param, at, of = f"mlp.experts.experts{param[expert.end() :]}", (*at, int(expert[1])), (*of, experts)
    return replace(stack, param=param, at=at, of=of)


def _parts(stack: Stack) -> Iterator[tuple[Box, str | None, Box]]:
    """The parts of a stack as ``Laid`` has them."""
    offset = 0
    above = tuple(i + 1 for i in stack.at)
    for part in stack.parts:
        extent = part.stop - part.start
        slab = _slab(stack.shape, stack.axis, offset, offset + extent)
        box = Box(stack.at + slab.start, above + slab.stop)
        region = _slab(stack.shape, stack.axis, part.start, part.stop)
        yield box, part.tensor, Box(region.start[::-1], region.stop[::-1]) if stack.transposed else region
        offset += extent


def _slab(shape: Shape, axis: int, start: int, stop: int) -> Box:
    """[start, stop) along an axis, everything along the others."""
    low, high = [0] * len(shape), list(shape)
    low[axis], high[axis] = start, stop
    return Box(tuple(low), tuple(high))
