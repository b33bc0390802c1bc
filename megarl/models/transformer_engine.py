"""Layers of Transformer Engine: the models that they take, and the names of their parameters.

The maps have the names of Megatron's local layers, whose norms are modules. Transformer Engine has
them in the linear layer that follows.
"""

from __future__ import annotations

from collections.abc import Collection

from megarl.models.dims import Dims
from megarl.models.hf_config import LayerSpec

NormNames = tuple[str, str]
"""The names of a norm where it is a module, and where it is a part of the next linear layer."""

INPUT_NORM: NormNames = ("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
DELTA_NET_NORM: NormNames = ("input_layernorm.", "self_attention.in_proj.layer_norm_")
MLP_NORM: NormNames = ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
LATENT_NORMS: tuple[NormNames, ...] = (
    ("self_attention.q_layernorm.", "self_attention.linear_q_up_proj.layer_norm_"),
    ("self_attention.kv_layernorm.", "self_attention.linear_kv_up_proj.layer_norm_"),
)

_HEAD_STEP = 8
_LARGEST_HEAD = 128


def name_in_maps(parameter: str) -> str:
    """Returns the name in shard maps of a parameter of either kind of layers."""
    for module, fused in (INPUT_NORM, MLP_NORM):
        parameter = parameter.replace(fused, module)
    return parameter


def refusals(dims: Dims, kinds: Collection[LayerSpec], dtype: str) -> list[str]:
    """Returns why a model keeps Megatron's local layers; none if it need not.

    cuDNN has packed attention forward and backward for these heads on every device that has it at
    all; with others, Transformer Engine may take one that stores the products of all positions
    (common/fused_attn/fused_attn.cpp, 2.8 to 2.18). Its matrix products of float32 are in TF32
    (common/gemm/cublaslt_gemm.cu).
    """
    found: list[str] = []
    if dtype not in ("bfloat16", "float16"):
        found.append(f"its products of {dtype} are not exact: only bfloat16 and float16 are supported")
    if dims.head_dim % _HEAD_STEP or dims.head_dim > _LARGEST_HEAD:
        supported = f"multiples of {_HEAD_STEP} up to {_LARGEST_HEAD}"
        found.append(f"heads of {dims.head_dim}: its packed attention has {supported}")
    if dims.delta is not None:
        found.append("gated delta nets are not supported in its layers")
    if dims.mla is not None:
        found.append("multi-head latent attention is not supported in its layers")
    if any(kind.post_norms for kind in kinds):
        found.append("norms after attention and MLP are not supported in its layers")
    if len({kind.window for kind in kinds}) > 1:
        found.append("windows of some layers are not supported in its layers")
    if dims.experts:
        found.append("mixtures of experts are not supported in its layers")
    return found
