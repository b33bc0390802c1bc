"""The model families: decoders with Llama's tensors, with experts, and GPT-2.

GPT-2 has learned positions, LayerNorms, biases everywhere, and matrices that HF stores as [inputs,
outputs]. The dropouts in its configs belong to pretraining and are not applied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megarl.models.decoder_tables import (
    DOWN,
    GATE_UP,
    QKV,
    full_attention,
    llama_table,
    mixture,
    routing,
)
from megarl.models.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from megarl.models.expert_params import Experts
from megarl.models.gemma import GEMMA3
from megarl.models.glm import GLM4_MOE, GLM4_MOE_LITE
from megarl.models.gpt_oss import GPT_OSS
from megarl.models.hf_config import Family, HFConfigReader, LayerSpec, ParamTable
from megarl.models.param_stacks import Names
from megarl.models.param_types import (
    ColumnParallel,
    FusedQKV,
    Replicated,
    RowParallel,
    VocabRows,
)
from megarl.models.qwen import (
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_5_MOE_WHOLE,
    QWEN3_5_WHOLE,
    QWEN3_MOE,
    QWEN3_NEXT,
)


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
        attention=full_attention(bias=biased, output_bias=biased),
        mlp=(replace(GATE_UP, bias=biased), replace(DOWN, bias=biased)),
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
    _, output = full_attention()
    qkv = replace(QKV, hf=(QKV.vllm,) * 3)
    gate_up = replace(GATE_UP, hf=(GATE_UP.vllm,) * 2)
    return llama_table(read, attention=(qkv, output), mlp=(gate_up, DOWN), window=read.window())


PHI3 = Family(
    model_type="phi3",
    lm_class="Phi3ForCausalLM",
    score_class="Phi3ForSequenceClassification",
    describe=_phi3,
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "original_max_position_embeddings": 4096},
    partial_rotary=True,
    rope_types=("default", "longrope"),
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


def _gpt2(read: HFConfigReader) -> ParamTable:
    read.require("scale_attn_weights", True, only="attention scaled by the root of the head's width")
    read.require("scale_attn_by_inverse_layer_idx", False, only="attention scaled alike in all layers")
    read.require("reorder_and_upcast_attn", False, only="False")
    read.require("add_cross_attention", False, only="decoders without encoders")
    read.require("sliding_window", only="full attention, which transformers assumes")
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
    engine_adapters=False,
    ignored=("*.attn.bias", "*.attn.masked_bias"),
)


_ALL = (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    PHI3,
    GPT2,
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_MOE,
    QWEN3_NEXT,
    QWEN3_5,
    QWEN3_5_WHOLE,
    QWEN3_5_MOE,
    QWEN3_5_MOE_WHOLE,
    GLM4_MOE,
    GLM4_MOE_LITE,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GEMMA3,
    GPT_OSS,
)
FAMILIES: Mapping[str, Family] = {family.model_type: family for family in _ALL}
"""Families by HF's ``model_type``."""
