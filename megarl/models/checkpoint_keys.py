"""How Megatron's distributed checkpoints store what the modules of a layer hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megarl.models.dims import Dims
from megarl.models.expert_params import MEGATRON_EXPERTS
from megarl.models.hf_config import LayerSpec
from megarl.models.param_stacks import Stack
from megarl.models.transformer_engine import DELTA_NET_NORM, INPUT_NORM, LATENT_NORMS, MLP_NORM, NormNames
from megarl.weights.shard_map import Shape

_SEPARATE: Mapping[str, tuple[str, ...]] = {
    "self_attention.in_proj.weight": ("query", "key", "value", "z", "beta", "alpha"),
    "self_attention.conv1d.weight": ("query", "key", "value"),
}
"""Parameters whose parts are stored one by one, and the names of these."""


def fused_norms(dims: Dims, kind: LayerSpec, *, transformer_engine: bool) -> list[NormNames]:
    """Returns a layer's norms that checkpoints store by the names of Transformer Engine.

    Megatron's local layers store most of them by these too, but none with latent attention
    (models/gpt/gpt_layer_specs.py, megatron-core 0.19.2).
    """
    if dims.mla is not None and not transformer_engine:
        return []
    if dims.mla is not None:
        norms = list(LATENT_NORMS)
    elif kind.is_delta_net:
        norms = [DELTA_NET_NORM]
    else:
        norms = [INPUT_NORM]
    if not kind.is_mixture or not transformer_engine:
        norms.append(MLP_NORM)
    return norms


def parts_in_checkpoint(stack: Stack) -> list[Stack]:
    """Returns what distributed checkpoints store of a stack one by one (GatedDeltaNet, megatron-core 0.19.2)."""
    names = _SEPARATE.get(stack.param)
    if names is None:
        return [stack]
    stored: list[Stack] = []
    count = len(stack.parts) // len(names)
    for i, name in enumerate(names):
        parts = stack.parts[i * count : (i + 1) * count]
        rows = sum(part.size for part in parts)
        shape = (rows, *stack.shape[1:])
        stored.append(replace(stack, param=f"{stack.param}.{name}", shape=shape, parts=parts))
    return stored


def in_checkpoint(stack: Stack, leading: tuple[Shape, Shape], norms: Sequence[NormNames]) -> Stack:
    """Returns a layer's stack, whole, as Megatron's distributed checkpoints store it (megatron-core 0.19.2).

    Layers that are all alike are a leading axis (TransformerBlock.sharded_state_dict), and below it
    experts (SequentialMLP's).

    Args:
        leading: index and extent of the axis of layers; both are empty without one.
        norms: those with the names that they have where Transformer Engine fuses them into the linear layer that
            follows.
    """
    param = stack.param
    at = (*leading[0], *stack.at)
    of = (*leading[1], *stack.of)
    for module, fused in norms:
        if param.startswith(module):
            param = fused + param.removeprefix(module)
    if param.startswith(MEGATRON_EXPERTS):
        param = f"mlp.experts.experts.{param.removeprefix(MEGATRON_EXPERTS)}"
    return replace(stack, param=param, at=at, of=of)
