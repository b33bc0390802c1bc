"""Qwen3: Llama's tensors, with norms of each head's query and key."""

from __future__ import annotations

from megarl.weights.specs.elements import Element, Names, Vector
from megarl.weights.specs.family import Family, Table
from megarl.weights.specs.llama import llama_table
from megarl.weights.specs.reading import Reader

HEAD_NORMS: tuple[Element, ...] = tuple(
    Vector(
        names=Names(hf=f"self_attn.{of}_norm", megatron=f"self_attention.{of}_layernorm", vllm=f"self_attn.{of}_norm"),
        width="head",
    )
    for of in ("q", "k")
)


def refuse_uncommon_attention(read: Reader) -> None:
    """Notes what neither Qwen3 nor its mixtures of experts support."""
    read.require("attention_bias", False, only="False: vLLM's Qwen3 has no bias on o_proj")
    read.require("use_sliding_window", False, only="full attention")
    read.require("dual_chunk_attention_config", only="attention over the whole sequence")


def _describe(read: Reader) -> Table:
    refuse_uncommon_attention(read)
    return llama_table(read, head_norms=HEAD_NORMS, megatron={"qk_layernorm": True})


QWEN3 = Family(
    model_type="qwen3",
    lm_class="Qwen3ForCausalLM",
    score_class="Qwen3ForSequenceClassification",
    describe=_describe,
    defaults={"hidden_act": "silu", "head_dim": 128, "num_key_value_heads": 32, "rms_norm_eps": 1e-6},
)
