"""Dense decoders with Llama's tensors: Llama, Mistral, Phi-3, Qwen2 and Qwen3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megarl.models.fused_params import FusedGateUp, FusedQKV
from megarl.models.hf_config import Family, HFConfigReader, ParamTable
from megarl.models.param_types import Matrix, Names, ParamType, RowParallel, Vector, VocabRows

QKV = FusedQKV(
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    megatron="self_attention.linear_qkv",
    vllm="self_attn.qkv_proj",
)
MLP_IN = FusedGateUp(gate="mlp.gate_proj", up="mlp.up_proj", megatron="mlp.linear_fc1", vllm="mlp.gate_up_proj")
MLP_DOWN = RowParallel(names=Names("mlp.down_proj", "mlp.linear_fc2"), inputs="ffn")


def llama_table(
    read: HFConfigReader,
    *,
    qkv: FusedQKV = QKV,
    head_norms: tuple[ParamType, ...] = (),
    mlp: tuple[ParamType, ...] = (MLP_IN, MLP_DOWN),
    output_bias: bool = False,
    megatron: Mapping[str, Any] | None = None,
) -> ParamTable:
    """Returns Llama's parameters, with what differs in other families.

    Args:
        head_norms: norms of each head's query and key.
        mlp: the MLP, or what replaces it.
        output_bias: the attention's output projection has a bias.
        megatron: further fields of ``TransformerConfig``.
    """
    return ParamTable(
        embedding=VocabRows(names=Names("model.embed_tokens", "embedding.word_embeddings")),
        layer_prefix=Names("model.layers.{}.", "decoder.layers.{}."),
        layer=(
            Vector(names=Names("input_layernorm", "input_layernorm")),
            qkv,
            *head_norms,
            RowParallel(
                names=Names("self_attn.o_proj", "self_attention.linear_proj"), inputs="attention", bias=output_bias
            ),
            Vector(names=Names("post_attention_layernorm", "pre_mlp_layernorm")),
            *mlp,
        ),
        final=(Vector(names=Names("model.norm", "decoder.final_layernorm")),),
        output=VocabRows(names=Names("lm_head", "output_layer")),
        score=Matrix(names=Names("score", "output_layer"), rows="one"),
        megatron={
            "normalization": "RMSNorm",
            "layernorm_epsilon": read.number("rms_norm_eps"),
            "gated_linear_unit": True,
            "add_qkv_bias": qkv.bias,
            "add_bias_linear": False,
            **(megatron or {}),
        },
    )


def _llama(read: HFConfigReader) -> ParamTable:
    biased = bool(read.get("attention_bias"))
    if biased != bool(read.get("mlp_bias")):
        read.problems.append(
            "attention_bias, mlp_bias: only both or neither is supported (Megatron has one switch for both)"
        )
    for name in ("bias", "qkv_bias"):
        read.require(name, False, only="attention_bias with mlp_bias")
    read.require("sliding_window", only="full attention")
    return llama_table(
        read,
        qkv=replace(QKV, bias=biased),
        mlp=(replace(MLP_IN, bias=biased), replace(MLP_DOWN, bias=biased)),
        output_bias=biased,
        megatron={"add_bias_linear": biased},
    )


LLAMA = Family(
    model_type="llama",
    lm_class="LlamaForCausalLM",
    score_class="LlamaForSequenceClassification",
    describe=_llama,
    defaults={"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0},
)


def _mistral(read: HFConfigReader) -> ParamTable:
    read.require("sliding_window", only="null: full attention")
    read.require("llama_4_scaling", only="attention that positions do not scale")
    return llama_table(read)


MISTRAL = Family(
    model_type="mistral",
    lm_class="MistralForCausalLM",
    score_class="MistralForSequenceClassification",
    describe=_mistral,
    defaults={
        "hidden_act": "silu",
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
    },
)


_QKV = FusedQKV(
    query="self_attn.qkv_proj",
    key="self_attn.qkv_proj",
    value="self_attn.qkv_proj",
    megatron="self_attention.linear_qkv",
    vllm="self_attn.qkv_proj",
)
_GATE_UP = FusedGateUp(
    gate="mlp.gate_up_proj", up="mlp.gate_up_proj", megatron="mlp.linear_fc1", vllm="mlp.gate_up_proj"
)


def _phi3(read: HFConfigReader) -> ParamTable:
    read.require("sliding_window", only="full attention")
    for name in ("embd_pdrop", "resid_pdrop"):
        read.require(name, 0, only="0: trainer and engine must agree without randomness")
    return llama_table(read, qkv=_QKV, mlp=(_GATE_UP, MLP_DOWN))


PHI3 = Family(
    model_type="phi3",
    lm_class="Phi3ForCausalLM",
    score_class="Phi3ForSequenceClassification",
    describe=_phi3,
    defaults={"hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0},
)


def _qwen2(read: HFConfigReader) -> ParamTable:
    read.require("use_sliding_window", False, only="full attention")
    read.require("qk_norm", False, only="queries and keys without norms")
    read.require("dual_chunk_attention_config", only="attention over the whole sequence")
    head_dim, heads = read.get("head_dim"), read.positive("num_attention_heads")
    if head_dim is not None and head_dim * heads != read.get("hidden_size"):
        read.problems.append(
            f"head_dim: {head_dim} is not hidden_size / num_attention_heads, which vLLM's Qwen2 assumes"
        )
    return llama_table(read, qkv=replace(QKV, bias=True))


QWEN2 = Family(
    model_type="qwen2",
    lm_class="Qwen2ForCausalLM",
    score_class="Qwen2ForSequenceClassification",
    describe=_qwen2,
    defaults={"hidden_act": "silu", "rms_norm_eps": 1e-6},
)


HEAD_NORMS: tuple[ParamType, ...] = tuple(
    Vector(names=Names(f"self_attn.{of}_norm", f"self_attention.{of}_layernorm"), width="head") for of in ("q", "k")
)


def refuse_uncommon_attention(read: HFConfigReader) -> None:
    """Notes what neither Qwen3 nor Qwen3-MoE supports."""
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
    defaults={"hidden_act": "silu", "head_dim": 128, "num_key_value_heads": 32, "rms_norm_eps": 1e-6},
)
