"""Qwen's families: decoders with Llama's tensors, mixtures of experts, and hybrids with gated delta nets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from megarl.models.decoder_tables import (
    HEAD_NORMS,
    full_attention,
    layers_of_type,
    llama_table,
    qwen_mixture,
)
from megarl.models.hf_config import Family, HFConfigReader, ParamTable
from megarl.models.param_types import (
    DeltaNetParams,
    ParamType,
)


def _qwen2(read: HFConfigReader) -> ParamTable:
    read.require("use_sliding_window", False, only="full attention")
    read.require("qk_norm", False, only="queries and keys without norms")
    read.require("dual_chunk_attention_config", only="attention over the whole sequence")
    _refuse_other_heads(read)
    return llama_table(read, attention=full_attention(bias=True))


def _refuse_other_heads(read: HFConfigReader) -> None:
    """Adds a problem unless heads are as wide as vLLM's Qwen2 assumes."""
    hidden = read.positive("hidden_size")
    heads = read.positive("num_attention_heads")
    head_dim = read.positive("head_dim", hidden // heads)
    if read.get("head_dim") is not None and head_dim * heads != hidden:
        read.problems.append(
            f"head_dim: {head_dim} is not hidden_size / num_attention_heads, which vLLM's Qwen2 assumes"
        )


QWEN2 = Family(
    model_type="qwen2",
    lm_class="Qwen2ForCausalLM",
    score_class="Qwen2ForSequenceClassification",
    describe=_qwen2,
    defaults={"rms_norm_eps": 1e-6},
)


def refuse_uncommon_attention(read: HFConfigReader) -> None:
    """Adds problems for what neither Qwen3 nor Qwen3-MoE supports."""
    read.require("attention_bias", False, only="False: vLLM's Qwen3 has no bias on o_proj")
    read.require("use_sliding_window", False, only="full attention")
    read.require("dual_chunk_attention_config", only="attention over the whole sequence")


def _qwen3(read: HFConfigReader) -> ParamTable:
    refuse_uncommon_attention(read)
    return llama_table(read, attention=full_attention(head_norms=HEAD_NORMS), megatron={"qk_layernorm": True})


QWEN3 = Family(
    model_type="qwen3",
    lm_class="Qwen3ForCausalLM",
    score_class="Qwen3ForSequenceClassification",
    describe=_qwen3,
    defaults={"head_dim": 128, "num_key_value_heads": 32, "rms_norm_eps": 1e-6},
)


def sparse_layers(read: HFConfigReader) -> list[int]:
    """Returns the layers with experts, of Qwen's mixtures: every ``decoder_sparse_step``-th, but for exceptions."""
    layers = read.positive("num_hidden_layers")
    step = read.positive("decoder_sparse_step", 1)
    stated: Any = read.get("mlp_only_layers") or []
    exceptions: list[Any] = []
    if isinstance(stated, list):
        exceptions = cast(list[Any], stated)
    if not isinstance(stated, list) or any(type(layer) is not int for layer in exceptions):
        read.problem("mlp_only_layers", cast(object, stated), "is not a list of layers")
    found: list[int] = []
    for layer in range(layers):
        if (layer + 1) % step == 0 and layer not in exceptions:
            found.append(layer)
    if not found:
        read.problem("mlp_only_layers, decoder_sparse_step", (exceptions, step), "leave no layer with experts")
    return found


def _qwen3_moe(read: HFConfigReader) -> ParamTable:
    refuse_uncommon_attention(read)
    read.require("shared_expert_intermediate_size", 0, only="routed experts")
    mixtures, fields = qwen_mixture(read, sparse_layers(read), renormalised=read.flag("norm_topk_prob"))
    megatron = {"qk_layernorm": True, **fields}
    return llama_table(read, attention=full_attention(head_norms=HEAD_NORMS), experts=mixtures, megatron=megatron)


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    lm_class="Qwen3MoeForCausalLM",
    score_class="Qwen3MoeForSequenceClassification",
    describe=_qwen3_moe,
    fields={"num_experts": ("num_experts", "num_local_experts")},
    defaults={
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
    },
)


def _qwen2_moe(read: HFConfigReader) -> ParamTable:
    read.require("use_sliding_window", False, only="full attention")
    read.require("dual_chunk_attention_config", only="attention over the whole sequence")
    read.require("qkv_bias", True, only="True, which vLLM's Qwen2-MoE assumes")
    _refuse_other_heads(read)
    mixtures, fields = qwen_mixture(read, sparse_layers(read), renormalised=read.flag("norm_topk_prob"))
    return llama_table(read, attention=full_attention(bias=True), experts=mixtures, megatron=fields)


QWEN2_MOE = Family(
    model_type="qwen2_moe",
    lm_class="Qwen2MoeForCausalLM",
    score_class="Qwen2MoeForSequenceClassification",
    describe=_qwen2_moe,
    fields={"num_experts": ("num_experts",)},
    defaults={
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 16,
        "rms_norm_eps": 1e-6,
    },
    shared_expert="gated",
)


def _hybrid(
    read: HFConfigReader,
    *,
    experts: Mapping[int, tuple[ParamType, ...]] | None = None,
    fields: Mapping[str, Any] | None = None,
    interleaved: bool = False,
) -> ParamTable:
    """Returns the parameters of decoders from Qwen3-Next on.

    Layers are gated delta nets or gated attention: queries have gates beside them, which multiply the
    attention's output. Norms multiply by 1 + weight, but for those of delta nets' outputs.

    Args:
        experts: router and experts of the layers that have them.
        fields: their fields of ``TransformerConfig``.
        interleaved: see ``DeltaNetParams``.
    """
    read.require("attention_bias", False, only="False: vLLM's Qwen3.5 has no bias on o_proj")
    read.require("qkv_bias", False, only="False, as transformers has it")
    read.require("attn_output_gate", True, only="gated attention")
    read.require("output_gate_type", "silu", "swish", only="silu, which transformers assumes")
    read.require("layer_scale", False, only="layers without scales")
    read.require("sliding_window", only="full attention, which transformers assumes")
    delta_nets = layers_of_type(read, "linear_attention", interval="full_attention_interval", default=4)
    frequency: list[int] | int = 1  # layers that are all alike are one tensor in checkpoints
    if 0 < sum(delta_nets) < len(delta_nets):
        frequency = [int(is_delta_net) for is_delta_net in delta_nets]
    return llama_table(
        read,
        prefix="model.language_model." if read.family.has_text_config else "model.",
        attention=full_attention(head_norms=HEAD_NORMS, gated=True),
        experts=experts,
        delta_nets=[layer for layer, is_delta_net in enumerate(delta_nets) if is_delta_net],
        delta_net=DeltaNetParams(interleaved=interleaved),
        megatron={
            "qk_layernorm": True,
            "attention_output_gate": True,
            "layernorm_zero_centered_gamma": True,
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": frequency,
            **(fields or {}),
        },
    )


def _qwen3_5_moe(read: HFConfigReader) -> ParamTable:
    read.require("norm_topk_prob", True, only="True, which transformers assumes")
    read.require("mlp_only_layers", [], only="experts in all layers, which transformers assumes")
    read.require("decoder_sparse_step", 1, only="experts in all layers, which transformers assumes")
    layers = range(read.positive("num_hidden_layers"))
    experts, fields = qwen_mixture(read, layers, renormalised=True)
    return _hybrid(read, experts=experts, fields=fields)


def _qwen3_next(read: HFConfigReader) -> ParamTable:
    read.require("tie_word_embeddings", False, only="False: vLLM's Qwen3-Next has an output layer")
    renormalised = read.flag("norm_topk_prob")
    experts, fields = qwen_mixture(read, sparse_layers(read), renormalised=renormalised)
    return _hybrid(read, experts=experts, fields=fields, interleaved=True)


QWEN3_5 = Family(
    model_type="qwen3_5_text",
    lm_class="Qwen3_5ForCausalLM",
    score_class="Qwen3_5TextForSequenceClassification",
    describe=_hybrid,
    defaults={
        "head_dim": 256,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
    partial_rotary=True,
    unused_rope=("mrope_section", "mrope_interleaved"),
    layer_types=("full_attention", "linear_attention"),
    untrained=("mtp.*",),
)


QWEN3_5_WHOLE = replace(
    QWEN3_5,
    model_type="qwen3_5",
    lm_class="Qwen3_5ForConditionalGeneration",
    score_class="Qwen3_5ForSequenceClassification",
    untrained=("model.visual.*", "mtp.*"),
    has_text_config=True,
    engine_class="Qwen3_5ForCausalLM",
)


QWEN3_5_MOE = replace(
    QWEN3_5,
    model_type="qwen3_5_moe_text",
    lm_class="Qwen3_5MoeForCausalLM",
    score_class="Qwen3_5MoeTextForSequenceClassification",  # which transformers 5.19 lacks
    describe=_qwen3_5_moe,
    fields={"num_experts": ("num_experts",)},
    defaults={
        **QWEN3_5.defaults,
        "num_key_value_heads": 2,
        "intermediate_size": 512,  # of no layer
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    shared_expert="gated",
)
QWEN3_5_MOE_WHOLE = replace(
    QWEN3_5_MOE,
    model_type="qwen3_5_moe",
    lm_class="Qwen3_5MoeForConditionalGeneration",
    score_class="Qwen3_5MoeForSequenceClassification",  # likewise
    untrained=QWEN3_5_WHOLE.untrained,
    has_text_config=True,
    engine_class="Qwen3_5MoeForCausalLM",
)
QWEN3_NEXT = replace(
    QWEN3_5_MOE,
    model_type="qwen3_next",
    lm_class="Qwen3NextForCausalLM",
    score_class="Qwen3NextForSequenceClassification",
    describe=_qwen3_next,
    defaults={
        **QWEN3_5_MOE.defaults,
        "intermediate_size": 5632,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
    },
)
