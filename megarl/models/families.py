"""The model families: decoders with Llama's tensors, with experts, and GPT-2.

GPT-2 has learned positions, LayerNorms, biases everywhere, and matrices that HF stores as [inputs,
outputs]. The dropouts in its configs belong to pretraining and are not applied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from megarl.models.decoder_tables import DOWN, GATE_UP, HEAD_NORMS, QKV, llama_table, mixture, routing
from megarl.models.hf_config import Family, HFConfigReader, LayerSpec, ParamTable
from megarl.models.param_types import ColumnParallel, Experts, FusedQKV, Names, Replicated, RowParallel, VocabRows


def _llama(read: HFConfigReader) -> ParamTable:
    biased = read.flag("attention_bias")
    if biased != read.flag("mlp_bias"):
        read.problems.append(
            "attention_bias, mlp_bias: only both or neither is supported (Megatron has one switch for both)"
        )
    for name in ("bias", "qkv_bias"):
        read.require(name, False, only="attention_bias with mlp_bias")
    read.require("sliding_window", only="full attention")
    return llama_table(
        read,
        qkv=replace(QKV, bias=biased),
        mlp=(replace(GATE_UP, bias=biased), replace(DOWN, bias=biased)),
        output_bias=biased,
        megatron={"add_bias_linear": biased},
    )


LLAMA = Family(
    model_type="llama",
    lm_class="LlamaForCausalLM",
    score_class="LlamaForSequenceClassification",
    describe=_llama,
    defaults={"rms_norm_eps": 1e-6, "rope_theta": 10000.0},
)


def _mistral(read: HFConfigReader) -> ParamTable:
    read.require("llama_4_scaling", only="attention that positions do not scale")
    return llama_table(read, window=read.window())


MISTRAL = Family(
    model_type="mistral",
    lm_class="MistralForCausalLM",
    score_class="MistralForSequenceClassification",
    describe=_mistral,
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
    },
)


def _phi3(read: HFConfigReader) -> ParamTable:
    for name in ("embd_pdrop", "resid_pdrop"):
        read.require(name, 0, only="0: trainer and engine must agree without randomness")
    # HF fuses as vLLM does.
    qkv = replace(QKV, hf=(QKV.vllm,) * 3)
    gate_up = replace(GATE_UP, hf=(GATE_UP.vllm,) * 2)
    return llama_table(read, qkv=qkv, mlp=(gate_up, DOWN), window=read.window())


PHI3 = Family(
    model_type="phi3",
    lm_class="Phi3ForCausalLM",
    score_class="Phi3ForSequenceClassification",
    describe=_phi3,
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "original_max_position_embeddings": 4096},
    partial_rotary=True,
    rope_types=("default", "longrope"),
)


def _qwen2(read: HFConfigReader) -> ParamTable:
    read.require("use_sliding_window", False, only="full attention")
    read.require("qk_norm", False, only="queries and keys without norms")
    read.require("dual_chunk_attention_config", only="attention over the whole sequence")
    hidden = read.positive("hidden_size")
    heads = read.positive("num_attention_heads")
    head_dim = read.positive("head_dim", hidden // heads)
    if read.get("head_dim") is not None and head_dim * heads != hidden:
        read.problems.append(
            f"head_dim: {head_dim} is not hidden_size / num_attention_heads, which vLLM's Qwen2 assumes"
        )
    return llama_table(read, qkv=replace(QKV, bias=True))


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
    return llama_table(read, head_norms=HEAD_NORMS, megatron={"qk_layernorm": True})


QWEN3 = Family(
    model_type="qwen3",
    lm_class="Qwen3ForCausalLM",
    score_class="Qwen3ForSequenceClassification",
    describe=_qwen3,
    defaults={"head_dim": 128, "num_key_value_heads": 32, "rms_norm_eps": 1e-6},
)


def _mixtral(read: HFConfigReader) -> ParamTable:
    read.require("router_jitter_noise", 0, only="0: routing without noise")
    mlp = mixture("block_sparse_moe.gate", Experts(module="block_sparse_moe.experts", gate="w1", up="w3", down="w2"))
    mixtures = dict.fromkeys(range(read.positive("num_hidden_layers")), mlp)
    megatron = routing(read, mixtures, renormalised=True)
    return llama_table(read, experts=mixtures, window=read.window(), megatron=megatron)


MIXTRAL = Family(
    model_type="mixtral",
    lm_class="MixtralForCausalLM",
    score_class="MixtralForSequenceClassification",
    describe=_mixtral,
    fields={"num_experts": ("num_local_experts",), "moe_intermediate_size": ("intermediate_size",)},
    defaults={
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
    },
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
    mlp = mixture("mlp.gate", Experts(module="mlp.experts", gate="gate_proj", up="up_proj", down="down_proj"))
    mixtures = dict.fromkeys(sparse_layers(read), mlp)
    megatron = {"qk_layernorm": True, **routing(read, mixtures, renormalised=read.flag("norm_topk_prob"))}
    return llama_table(read, head_norms=HEAD_NORMS, experts=mixtures, megatron=megatron)


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


def _gpt2(read: HFConfigReader) -> ParamTable:
    read.require("scale_attn_weights", True, only="attention scaled by the root of the head's width")
    read.require("scale_attn_by_inverse_layer_idx", False, only="attention scaled alike in all layers")
    read.require("reorder_and_upcast_attn", False, only="False")
    read.require("add_cross_attention", False, only="decoders without encoders")
    attention_output = Names("attn.c_proj", "self_attention.linear_proj")
    layer = LayerSpec(
        (
            Replicated(names=Names("ln_1", "input_layernorm"), bias=True),
            FusedQKV(
                hf=("attn.c_attn", "attn.c_attn", "attn.c_attn"),
                megatron="self_attention.linear_qkv",
                vllm="attn.c_attn",
                bias=True,
                transposed=True,
            ),
            RowParallel(names=attention_output, inputs="attention", bias=True, transposed=True),
            Replicated(names=Names("ln_2", "pre_mlp_layernorm"), bias=True),
            ColumnParallel(hf=("mlp.c_fc",), megatron="mlp.linear_fc1", vllm="mlp.c_fc", bias=True, transposed=True),
            RowParallel(names=Names("mlp.c_proj", "mlp.linear_fc2"), inputs="ffn", bias=True, transposed=True),
        )
    )
    return ParamTable(
        embedding=VocabRows(names=Names("transformer.wte", "embedding.word_embeddings")),
        positions=Replicated(
            names=Names("transformer.wpe", "embedding.position_embeddings"), shape=("positions", "hidden")
        ),
        layer_prefix=Names("transformer.h.{}.", "decoder.layers.{}."),
        layers=(layer,) * read.positive("num_hidden_layers"),
        final=(Replicated(names=Names("transformer.ln_f", "decoder.final_layernorm"), bias=True),),
        megatron={
            "normalization": "LayerNorm",
            "layernorm_epsilon": read.number("layer_norm_epsilon"),
            "gated_linear_unit": False,
            "add_qkv_bias": True,
            "add_bias_linear": True,
        },
    )


GPT2 = Family(
    model_type="gpt2",
    lm_class="GPT2LMHeadModel",
    score_class="GPT2ForSequenceClassification",
    describe=_gpt2,
    fields={
        "hidden_size": ("n_embd",),
        "intermediate_size": ("n_inner",),
        "num_hidden_layers": ("n_layer",),
        "num_attention_heads": ("n_head",),
        "max_position_embeddings": ("n_positions",),
        "hidden_act": ("activation_function",),
    },
    defaults={"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
    activation="gelu_tanh",
    rotary=False,
    mlp_ratio=4,
    bare_prefix="transformer.",
    ignored=("*.attn.bias", "*.attn.masked_bias"),
)


def _delta_nets(read: HFConfigReader) -> list[bool]:
    """Reads which layers are gated delta nets.

    ``layer_types`` says so, or else ``full_attention_interval``: by default, all but each fourth are.
    """
    layers = read.positive("num_hidden_layers")
    interval = read.positive("full_attention_interval", 4)
    stated: Any = read.get("layer_types")
    found: list[bool] = []
    if stated is None:
        for layer in range(layers):
            found.append((layer + 1) % interval != 0)
        return found
    if not isinstance(stated, list):
        read.problem("layer_types", stated, "is not a list")
        return found
    for kind in cast(list[Any], stated):
        found.append(kind == "linear_attention")
    if len(found) != layers:
        read.problem("layer_types", len(found), f"types are not those of {layers} layers")
    return found


def _qwen3_5(read: HFConfigReader) -> ParamTable:
    """Returns the parameters of Qwen3.5's language model.

    Layers are gated delta nets or gated attention: queries have gates beside them, which multiply the
    attention's output. Norms multiply by 1 + weight, but for those of delta nets' outputs. Files of the
    whole model (``Qwen3_5ForConditionalGeneration``) are not supported.
    """
    read.require("attention_bias", False, only="False: vLLM's Qwen3.5 has no bias on o_proj")
    read.require("attn_output_gate", True, only="gated attention")
    read.require("output_gate_type", "silu", "swish", only="silu, which transformers assumes")
    read.require("layer_scale", False, only="layers without scales")
    delta_nets = _delta_nets(read)
    frequency: list[int] | int = 1  # layers that are all alike are one tensor in checkpoints
    if 0 < sum(delta_nets) < len(delta_nets):
        frequency = [int(is_delta_net) for is_delta_net in delta_nets]
    return llama_table(
        read,
        qkv=replace(QKV, gated=True),
        head_norms=HEAD_NORMS,
        delta_nets=[layer for layer, is_delta_net in enumerate(delta_nets) if is_delta_net],
        megatron={
            "qk_layernorm": True,
            "attention_output_gate": True,
            "layernorm_zero_centered_gamma": True,
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": frequency,
        },
    )


QWEN3_5 = Family(
    model_type="qwen3_5_text",
    lm_class="Qwen3_5ForCausalLM",
    score_class="Qwen3_5TextForSequenceClassification",
    describe=_qwen3_5,
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
)


_ALL = (LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, GPT2, MIXTRAL, QWEN3_MOE, QWEN3_5)
FAMILIES: Mapping[str, Family] = {family.model_type: family for family in _ALL}
"""Families by HF's ``model_type``."""
