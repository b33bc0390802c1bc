"""From stacks to shard maps: a holder's, and that of a Megatron checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from megarl.weights.regions import Box, Hole, Piece, Shape, ShardMap, TensorInfo
from megarl.weights.specs.blocks import MEGATRON_EXPERTS
from megarl.weights.specs.elements import Stack

Prefixed = tuple[str, str, Stack]
"""A stack with the prefixes of its local and its canonical names."""

_EXPERT = re.compile(re.escape(MEGATRON_EXPERTS).replace(r"\{\}", r"(\d+)"))
_INPUT_NORM = ("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
_MLP_NORM = ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")


def shard_map(stacks: Iterable[Prefixed], dtype: str) -> ShardMap:
    """The map of a holder that has these stacks."""
    params: dict[str, TensorInfo] = {}
    pieces: list[Piece] = []
    holes: list[Hole] = []
    for local, hf, stack in stacks:
        param = local + stack.param
        params[param] = TensorInfo(stack.of + stack.shape, dtype)
        for part in _parts(param, hf, stack):
            pieces.append(part) if isinstance(part, Piece) else holes.append(part)
    return ShardMap(params=params, pieces=tuple(pieces), holes=tuple(holes))


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


def _parts(param: str, prefix: str, stack: Stack) -> Iterator[Piece | Hole]:
    """The pieces and holes of a stack."""
    offset = 0
    above = tuple(i + 1 for i in stack.at)
    for part in stack.parts:
        extent = part.stop - part.start
        slab = _slab(stack.shape, stack.axis, offset, offset + extent)
        box = Box(stack.at + slab.start, above + slab.stop) if stack.at else slab
        if part.tensor is None:
            yield Hole(param=param, box=box)
        else:
            region = _slab(stack.shape, stack.axis, part.start, part.stop)
            if stack.transposed:
                region = Box(region.start[::-1], region.stop[::-1])
            name = prefix + part.tensor
            yield Piece(param=param, box=box, name=name, region=region, transposed=stack.transposed)
        offset += extent


def _slab(shape: Shape, axis: int, start: int, stop: int) -> Box:
    """[start, stop) along an axis, everything along the others."""
    low, high = [0] * len(shape), list(shape)
    low[axis], high[axis] = start, stop
    return Box(tuple(low), tuple(high))
