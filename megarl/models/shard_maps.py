"""Shard maps from stacks: of a rank, and of a Megatron checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from megarl.models.fused_params import MEGATRON_EXPERTS
from megarl.models.param_types import Stack
from megarl.weights.shard_map import Padding, Shard, ShardMap, TensorInfo

_EXPERT = re.compile(re.escape(MEGATRON_EXPERTS).replace(r"\{\}", r"(\d+)"))
_INPUT_NORM = ("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
_MLP_NORM = ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")


Prefixed = tuple[str, str, Sequence[Stack]]
"""Prefixes of local and canonical names, and stacks, which layers share."""


def build_shard_map(groups: Iterable[Prefixed], dtype: str) -> ShardMap:
    """Returns the map of a holder of these stacks."""
    params: dict[str, TensorInfo] = {}
    shards: list[Shard] = []
    padding: list[Padding] = []
    for local, hf, stacks in groups:
        for stack in stacks:
            param = local + stack.param
            params[param] = TensorInfo(stack.of + stack.shape, dtype)
            for box, tensor, region in stack.boxes:
                if tensor is None:
                    padding.append(Padding(param=param, box=box))
                else:
                    named = Shard(param=param, box=box, name=hf + tensor, region=region, transposed=stack.transposed)
                    shards.append(named)
    return ShardMap(params=params, shards=tuple(shards), padding=tuple(padding))


def in_checkpoint(stack: Stack, layer: int, layers: int, *, experts: int, norm_in_mlp: bool) -> Stack:
    """Returns a layer's stack, whole, as Megatron's distributed checkpoints store it (megatron-core 0.16.1).

    Layers are a leading axis (TransformerBlock.sharded_state_dict), and below it experts (SequentialMLP's). Norms have
    the names that they have where Transformer Engine fuses them into the linear layer that follows
    (``sharded_state_dict_keys_map`` of models/gpt/gpt_layer_specs.py).

    Args:
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
