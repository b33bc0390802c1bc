"""Dense decoders with Llama's tensors: Llama, Mistral, Phi-3, Qwen2 and Qwen3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megarl.models.fused_params import FusedQKV
from megarl.models.hf_config import Family, HFConfigReader, ParamTable
from megarl.models.param_types import ColumnParallel, Names, ParamType, Replicated, RowParallel, VocabRows

QKV = FusedQKV(
    hf=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    megatron="self_attention.linear_qkv",
    vllm="self_attn.qkv_proj",
)
GATE_UP = ColumnParallel(
    hf=("mlp.gate_proj", "mlp.up_proj"), megatron="mlp.linear_fc1", vllm="mlp.gate_up_proj", outputs="ffn"
)
DOWN = RowParallel(names=Names("mlp.down_proj", "mlp.linear_fc2"), inputs="ffn")


def llama_table(
    read: HFConfigReader,
    *,
    qkv: FusedQKV = QKV,
    head_norms: tuple[ParamType, ...] = (),
    mlp: tuple[ParamType, ...] = (GATE_UP, DOWN),
    output_bias: bool = False,
    megatron: Mapping[str, Any] | None = None,
) -> ParamTable:
    """Returns Llama's parameters, with what differs in other families.

    Args:
        head_norms: norms of each head's query and key.
        mlp: the MLP, or the router and the experts.
        output_bias: whether the attention's output projection has a bias.
        megatron: additional fields of ``TransformerConfig``.
    """
    attention_output = Names("self_attn.o_proj", "self_attention.linear_proj")
    return ParamTable(
        embedding=VocabRows(names=Names("model.embed_tokens", "embedding.word_embeddings")),
        layer_prefix=Names("model.layers.{}.", "decoder.layers.{}."),
        layer=(
            Replicated(names=Names("input_layernorm", "input_layernorm")),
            qkv,
            *head_norms,
            RowParallel(names=attention_output, inputs="attention", bias=output_bias),
            Replicated(names=Names("post_attention_layernorm", "pre_mlp_layernorm")),
            *mlp,
        ),
        final=(Replicated(names=Names("model.norm", "decoder.final_layernorm")),),
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


def _phi3(read: HFConfigReader) -> ParamTable:
    read.require("sliding_window", only="full attention")
    for name in ("embd_pdrop", "resid_pdrop"):
        read.require(name, 0, only="0: trainer and engine must agree without randomness")
    # HF fuses as vLLM does.
    qkv = replace(QKV, hf=(QKV.vllm,) * 3)
    gate_up = replace(GATE_UP, hf=(GATE_UP.vllm,) * 2)
    return llama_table(read, qkv=qkv, mlp=(gate_up, DOWN))


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
    defaults={"hidden_act": "silu", "rms_norm_eps": 1e-6},
)


HEAD_NORMS: tuple[ParamType, ...] = tuple(
    Replicated(names=Names(f"self_attn.{of}_norm", f"self_attention.{of}_layernorm"), shape=("head",))
    for of in ("q", "k")
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
    defaults={"hidden_act": "silu", "head_dim": 128, "num_key_value_heads": 32, "rms_norm_eps": 1e-6},
)
