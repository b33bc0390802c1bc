"""Qwen2 and Qwen2.5: Llama's tensors, with biases on the query, key and value projections."""

from __future__ import annotations

from megarl.weights.specs.family import Family, HFConfig, Table
from megarl.weights.specs.llama import llama_table


def _table(config: HFConfig) -> Table:
    return llama_table(qkv_bias=True)


def _refusals(config: HFConfig) -> list[str]:
    problems: list[str] = []
    if config.get("use_sliding_window"):
        problems.append("use_sliding_window: True is not supported (only full attention)")
    for name in ("qk_norm", "dual_chunk_attention_config"):
        if config.get(name):
            problems.append(f"{name}: {config[name]!r} is not supported")
    head_dim, heads = config.get("head_dim"), config.get("num_attention_heads") or 1
    if head_dim is not None and head_dim * heads != config.get("hidden_size"):
        problems.append(f"head_dim: {head_dim} is not hidden_size / num_attention_heads, which vLLM's Qwen2 assumes")
    return problems


QWEN2 = Family(model_type="qwen2", prefix="Qwen2", table=_table, refusals=_refusals)
