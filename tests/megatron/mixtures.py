"""Tiny MoE models, with deliberately odd sizes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.megatron.tiny import save_model

_ATTENTION = {"num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10}
_QWEN3 = {**_ATTENTION, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 28, "vocab_size": 103}

MIXTURES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "mixtral": (
        "mixtral",
        {
            **_ATTENTION,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size": 44,
            "vocab_size": 101,
            "sliding_window": None,
        },
    ),
    "qwen3_moe": ("qwen3_moe", {**_QWEN3, "norm_topk_prob": False, "tie_word_embeddings": True}),
    "qwen3_moe_renormalised": ("qwen3_moe", {**_QWEN3, "norm_topk_prob": True}),
}
"""HF's model type, and fields of its config, by name."""


def save_mixture(directory: Path, name: str, seed: int = 0, **fields: Any) -> Path:
    """Writes one with random weights."""
    kind, own = MIXTURES[name]
    return save_model(directory, kind, seed, **{**own, **fields})
