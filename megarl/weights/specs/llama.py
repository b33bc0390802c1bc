"""Llama 2 and 3 (with llama3 rope scaling), with or without biases on all linear layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megarl.weights.specs.blocks import FusedGateUp, FusedQKV
from megarl.weights.specs.elements import Element, Matrix, Names, RowParallel, Vector, VocabRows
from megarl.weights.specs.family import Family, Table
from megarl.weights.specs.reading import Reader

QKV = FusedQKV(
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    megatron="self_attention.linear_qkv",
    vllm="self_attn.qkv_proj",
)
MLP_IN = FusedGateUp(gate="mlp.gate_proj", up="mlp.up_proj", megatron="mlp.linear_fc1", vllm="mlp.gate_up_proj")
MLP_DOWN = RowParallel(names=Names(hf="mlp.down_proj", megatron="mlp.linear_fc2", vllm="mlp.down_proj"), inputs="ffn")


def llama_table(
    read: Reader,
    *,
    qkv: FusedQKV = QKV,
    head_norms: tuple[Element, ...] = (),
    mlp: tuple[Element, ...] = (MLP_IN, MLP_DOWN),
    output_bias: bool = False,
    megatron: Mapping[str, Any] | None = None,
) -> Table:
    """Llama's tensors, which other families share.

    Args:
        qkv: the query, key and value projections.
        head_norms: norms of each head's query and key.
        mlp: the MLP, or what is in its place.
        output_bias: the attention's output projection has a bias.
        megatron: what Megatron has to know besides.
    """
    return Table(
        embedding=VocabRows(
            names=Names(hf="model.embed_tokens", megatron="embedding.word_embeddings", vllm="model.embed_tokens")
        ),
        layer_prefix=Names(hf="model.layers.{}.", megatron="decoder.layers.{}.", vllm="model.layers.{}."),
        layer=(
            Vector(names=Names(hf="input_layernorm", megatron="input_layernorm", vllm="input_layernorm")),
            qkv,
            *head_norms,
            RowParallel(
                names=Names(hf="self_attn.o_proj", megatron="self_attention.linear_proj", vllm="self_attn.o_proj"),
                inputs="attention",
                bias=output_bias,
            ),
            Vector(
                names=Names(
                    hf="post_attention_layernorm", megatron="pre_mlp_layernorm", vllm="post_attention_layernorm"
                )
            ),
            *mlp,
        ),
        final=(Vector(names=Names(hf="model.norm", megatron="decoder.final_layernorm", vllm="model.norm")),),
        output=VocabRows(names=Names(hf="lm_head", megatron="output_layer", vllm="lm_head")),
        score=Matrix(names=Names(hf="score", megatron="output_layer", vllm="score"), rows="one"),
        megatron={
            "normalization": "RMSNorm",
            "layernorm_epsilon": read.number("rms_norm_eps"),
            "gated_linear_unit": True,
            "add_qkv_bias": qkv.bias,
            "add_bias_linear": False,
            **(megatron or {}),
        },
    )


def _describe(read: Reader) -> Table:
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
    describe=_describe,
    defaults={"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0},
)
