"""Llama 2 and 3 (with llama3 rope scaling), with or without biases on all linear layers."""

from __future__ import annotations

from megarl.weights.specs.elements import FusedGateUp, FusedQKV, Names, Replicated, RowParallel, VocabRows
from megarl.weights.specs.family import Family, HFConfig, Table


def llama_table(*, qkv_bias: bool = False, linear_bias: bool = False) -> Table:
    """Llama's tensors, which other families share.

    Args:
        qkv_bias: the query, key and value projections have biases.
        linear_bias: all linear layers have.
    """
    return Table(
        embedding=VocabRows(
            names=Names(hf="model.embed_tokens", megatron="embedding.word_embeddings", vllm="model.embed_tokens")
        ),
        layer_prefix=Names(hf="model.layers.{}.", megatron="decoder.layers.{}.", vllm="model.layers.{}."),
        layer=(
            Replicated(names=Names(hf="input_layernorm", megatron="input_layernorm", vllm="input_layernorm")),
            FusedQKV(
                query="self_attn.q_proj",
                key="self_attn.k_proj",
                value="self_attn.v_proj",
                megatron="self_attention.linear_qkv",
                vllm="self_attn.qkv_proj",
                bias=qkv_bias or linear_bias,
            ),
            RowParallel(
                names=Names(hf="self_attn.o_proj", megatron="self_attention.linear_proj", vllm="self_attn.o_proj"),
                inputs="attention",
                bias=linear_bias,
            ),
            Replicated(
                names=Names(
                    hf="post_attention_layernorm", megatron="pre_mlp_layernorm", vllm="post_attention_layernorm"
                )
            ),
            FusedGateUp(
                gate="mlp.gate_proj",
                up="mlp.up_proj",
                megatron="mlp.linear_fc1",
                vllm="mlp.gate_up_proj",
                bias=linear_bias,
            ),
            RowParallel(
                names=Names(hf="mlp.down_proj", megatron="mlp.linear_fc2", vllm="mlp.down_proj"),
                inputs="ffn",
                bias=linear_bias,
            ),
        ),
        final=(Replicated(names=Names(hf="model.norm", megatron="decoder.final_layernorm", vllm="model.norm")),),
        output=VocabRows(names=Names(hf="lm_head", megatron="output_layer", vllm="lm_head")),
        score=Names(hf="score", megatron="output_layer", vllm="score"),
        qkv_bias=qkv_bias,
        linear_bias=linear_bias,
    )


def _table(config: HFConfig) -> Table:
    return llama_table(linear_bias=bool(config.get("attention_bias")))


def _refusals(config: HFConfig) -> list[str]:
    problems: list[str] = []
    if bool(config.get("attention_bias")) != bool(config.get("mlp_bias")):
        problems.append(
            "attention_bias, mlp_bias: only both or neither is supported (Megatron has one switch for both)"
        )
    for name in ("bias", "qkv_bias", "sliding_window"):
        if config.get(name):
            problems.append(f"{name}: {config[name]!r} is not supported")
    return problems


LLAMA = Family(model_type="llama", prefix="Llama", table=_table, refusals=_refusals, default_rope_base=10000.0)
