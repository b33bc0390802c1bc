"""The parameters of decoders with Llama's tensors, and what differs in other families."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from megarl.models.hf_config import HFConfigReader, LayerSpec, ParamTable
from megarl.models.param_types import (
    ColumnParallel,
    DeltaNetParams,
    Experts,
    FusedQKV,
    Names,
    ParamType,
    Replicated,
    RowParallel,
    VocabRows,
)

QKV = FusedQKV(
    hf=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    megatron="self_attention.linear_qkv",
    vllm="self_attn.qkv_proj",
)
GATE_UP = ColumnParallel(hf=("mlp.gate_proj", "mlp.up_proj"), megatron="mlp.linear_fc1", vllm="mlp.gate_up_proj")
DOWN = RowParallel(names=Names("mlp.down_proj", "mlp.linear_fc2"), inputs="ffn")
INPUT_NORM = Replicated(names=Names("input_layernorm", "input_layernorm"))
MLP_NORM = Replicated(names=Names("post_attention_layernorm", "pre_mlp_layernorm"))


def llama_table(
    read: HFConfigReader,
    *,
    qkv: FusedQKV = QKV,
    head_norms: tuple[ParamType, ...] = (),
    mlp: tuple[ParamType, ...] = (GATE_UP, DOWN),
    experts: Mapping[int, tuple[ParamType, ...]] | None = None,
    delta_nets: Collection[int] = (),
    output_bias: bool = False,
    window: int | None = None,
    megatron: Mapping[str, Any] | None = None,
) -> ParamTable:
    """Returns Llama's parameters, with what differs in other families.

    Args:
        head_norms: norms of each head's query and key.
        mlp: the MLP.
        experts: router and experts of the layers that have them in place of the MLP.
        delta_nets: layers with a gated delta net in place of attention.
        output_bias: whether the attention's output projection has a bias.
        window: last positions, its own included, that each one sees; None: all.
        megatron: additional fields of ``TransformerConfig``.
    """
    attention_output = Names("self_attn.o_proj", "self_attention.linear_proj")
    attention = (
        qkv,
        *head_norms,
        RowParallel(names=attention_output, inputs="attention", bias=output_bias),
    )
    mixtures = experts or {}
    layers: list[LayerSpec] = []
    for layer in range(read.positive("num_hidden_layers")):
        mixer: tuple[ParamType, ...] = attention
        if layer in delta_nets:
            mixer = (DeltaNetParams(),)
        params = (INPUT_NORM, *mixer, MLP_NORM, *mixtures.get(layer, mlp))
        layers.append(LayerSpec(params))
    return ParamTable(
        embedding=VocabRows(names=Names("model.embed_tokens", "embedding.word_embeddings")),
        layer_prefix=Names("model.layers.{}.", "decoder.layers.{}."),
        layers=tuple(layers),
        final=(Replicated(names=Names("model.norm", "decoder.final_layernorm")),),
        megatron={
            "normalization": "RMSNorm",
            "layernorm_epsilon": read.number("rms_norm_eps"),
            "gated_linear_unit": True,
            "add_qkv_bias": qkv.bias,
            "add_bias_linear": False,
            "window_size": None if window is None else (window - 1, 0),
            **(megatron or {}),
        },
    )


HEAD_NORMS: tuple[ParamType, ...] = tuple(
    Replicated(names=Names(f"self_attn.{of}_norm", f"self_attention.{of}_layernorm"), shape=("head",))
    for of in ("q", "k")
)


def routing(read: HFConfigReader, mixtures: Collection[int], *, renormalised: bool) -> dict[str, Any]:
    """Returns the router's fields of ``TransformerConfig``.

    Args:
        mixtures: layers with experts.
        renormalised: whether the weights of the chosen experts sum to 1.
    """
    chosen = read.positive("num_experts_per_tok")
    experts = read.positive("num_experts")
    if chosen > experts:
        read.problems.append(f"num_experts_per_tok: {chosen} exceeds the {experts} experts")
    if chosen == 1 and renormalised:
        read.problems.append("num_experts_per_tok: 1 is not supported where weights sum to 1 (Megatron refuses it)")
    layers = range(read.positive("num_hidden_layers"))
    sparse: dict[str, Any] = {}
    if len(mixtures) < len(layers):
        sparse["moe_layer_freq"] = [int(layer in mixtures) for layer in layers]
    return {
        **sparse,
        "num_moe_experts": experts,
        "moe_ffn_hidden_size": read.positive("moe_intermediate_size"),
        "moe_router_topk": chosen,
        "moe_router_pre_softmax": not renormalised,
    }


def mixture(router: str, experts: Experts) -> tuple[ParamType, ...]:
    """Returns the parameters of a layer's mixture of experts, whose router has HF's name ``router``."""
    return Replicated(names=Names(router, "mlp.router"), shape=("experts", "hidden")), experts
