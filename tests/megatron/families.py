"""Tiny models of every family, with deliberately odd sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.megatron.tiny import save_model


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family's tiny model.

    Args:
        kind: HF's model type.
        fields: of its config.
        tp: tensor parallel sizes that its heads allow.
    """

    kind: str
    fields: Mapping[str, Any]
    tp: tuple[int, ...] = (2,)

    def save(self, directory: Path, seed: int = 0, **fields: Any) -> Path:
        """Writes it with random weights."""
        return save_model(directory, self.kind, seed, **{**self.fields, **fields})


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e3,
    "factor": 8.0,
    "low_freq_factor": 1.5,
    "high_freq_factor": 6.0,
    "original_max_position_embeddings": 40,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e3,
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 8.0],
    "partial_rotary_factor": 0.5,
}

GEMMA_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"] * 2
_HYBRID = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 101,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 3,
    "full_attention_interval": 2,
    "rms_norm_eps": 1e-3,  # norms of a head's small outputs enlarge the noise of transformers beyond 1e-5
}
FAMILIES: Mapping[str, Family] = {
    # KV heads: of each rank two, of two ranks one, of each rank one, and so on; layers: no multiple of 2 x 2 chunks.
    "llama": Family(
        kind="llama",
        fields={
            "num_hidden_layers": 5,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 6,
            "intermediate_size": 44,
            "vocab_size": 101,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": LLAMA3_ROPE,
        },
        tp=(2, 4),
    ),
    "mistral": Family(
        kind="mistral",
        fields={
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 10,
            "intermediate_size": 52,
            "vocab_size": 103,
            "sliding_window": 5,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1e3, "factor": 3.0},
        },
        tp=(2, 4),
    ),
    "qwen2": Family(
        kind="qwen2",
        fields={
            "num_hidden_layers": 5,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "hidden_size": 36,
            "intermediate_size": 45,
            "vocab_size": 101,
            "tie_word_embeddings": True,
            "rope_parameters": YARN,
        },
        tp=(3,),
    ),
    "qwen3": Family(
        kind="qwen3",
        fields={
            "num_hidden_layers": 7,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 10,
            "intermediate_size": 44,
            "vocab_size": 107,
        },
        tp=(4, 2),
    ),
    "phi3": Family(
        kind="phi3",
        fields={
            "num_hidden_layers": 5,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 52,
            "vocab_size": 101,
            "pad_token_id": None,
            "sliding_window": 7,
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 64,
        },
        tp=(4, 2),
    ),
    "qwen3_5": Family(kind="qwen3_5_text", fields={**_HYBRID, "intermediate_size": 44}),
    "gemma3": Family(
        kind="gemma3_text",
        fields={
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 10,
            "intermediate_size": 44,
            "vocab_size": 101,
            "sliding_window": 5,
            "layer_types": GEMMA_LAYERS,
            "query_pre_attn_scalar": 20,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e3, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
            },
        },
    ),
    "gpt2": Family(
        kind="gpt2",
        fields={"n_layer": 7, "n_head": 4, "n_inner": 52, "vocab_size": 101, "n_positions": 23},
        tp=(2, 4),
    ),
}

_ATTENTION = {"num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 28, "vocab_size": 103}
_SHARED_MLP = {
    "intermediate_size": 44,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 28,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
    "vocab_size": 103,
}
_LATENT = {
    **_SHARED_MLP,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 18,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 10,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_NOAUX = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
LATENT_YARN = {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2}
MIXTURES: Mapping[str, Family] = {
    "mixtral": Family(
        kind="mixtral",
        fields={
            **_ATTENTION,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size": 44,
            "vocab_size": 101,
            "sliding_window": 9,
        },
    ),
    "qwen3_moe": Family(
        kind="qwen3_moe",
        fields={**_ATTENTION, **_EXPERTS, "norm_topk_prob": False, "tie_word_embeddings": True},
    ),
    "qwen2_moe": Family(
        kind="qwen2_moe",
        fields={
            "num_hidden_layers": 5,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            **_EXPERTS,
            "shared_expert_intermediate_size": 20,
            "norm_topk_prob": False,
        },
    ),
    "qwen3_next": Family(
        kind="qwen3_next",
        fields={
            **_HYBRID,
            **_EXPERTS,
            "shared_expert_intermediate_size": 20,
            "mlp_only_layers": [1],
            "intermediate_size": 44,
        },
    ),
    "qwen3_5_moe": Family(
        kind="qwen3_5_moe_text",
        fields={**_HYBRID, **_EXPERTS, "shared_expert_intermediate_size": 20},
    ),
    "glm4_moe": Family(
        kind="glm4_moe",
        fields={
            **_ATTENTION,
            "head_dim": 8,
            **_SHARED_MLP,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    "deepseek_v3": Family(
        kind="deepseek_v3", fields={**_LATENT, "q_lora_rank": 14, **_NOAUX, "rope_parameters": LATENT_YARN}
    ),
    "deepseek_v3_groups": Family(
        kind="deepseek_v3",
        fields={**_LATENT, "q_lora_rank": None, **_NOAUX, "n_group": 3, "topk_group": 2, "num_experts_per_tok": 4},
    ),
    "deepseek_v2": Family(kind="deepseek_v2", fields={**_LATENT, "q_lora_rank": None, "rope_parameters": LATENT_YARN}),
    "gpt_oss": Family(
        kind="gpt_oss",
        fields={
            **_ATTENTION,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "intermediate_size": 28,
            "vocab_size": 103,
            "sliding_window": 5,
            "pad_token_id": None,
            "rope_parameters": {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        },
    ),
    "glm4_moe_lite": Family(kind="glm4_moe_lite", fields={**_LATENT, "q_lora_rank": 14}),
    "several_kinds": Family(
        kind="qwen3_moe", fields={**_ATTENTION, **_EXPERTS, "mlp_only_layers": [1, 3], "intermediate_size": 44}
    ),
    "qwen3_moe_renormalised": Family(kind="qwen3_moe", fields={**_ATTENTION, **_EXPERTS, "norm_topk_prob": True}),
}
MODELS: Mapping[str, Family] = {
    "plain": Family(kind="qwen2", fields={}),
    "tied": Family(kind="qwen2", fields={"tie_word_embeddings": True}),
    **FAMILIES,
    **MIXTURES,
}
