"""Qwen2 and Qwen2.5: Llama's tensors, with biases on the query, key and value projections."""

from __future__ import annotations

from dataclasses import replace

from megarl.weights.specs.family import Family, Table
from megarl.weights.specs.llama import QKV, llama_table
from megarl.weights.specs.reading import Reader


def _describe(read: Reader) -> Table:
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
    describe=_describe,
    defaults={"hidden_act": "silu", "rms_norm_eps": 1e-6},
)
