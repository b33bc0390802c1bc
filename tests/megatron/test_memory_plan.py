"""The memory plan of a role, against the activations of Megatron's layers and the memory of processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.config.schema import LoRA
from megarl.types import Layout
from tests.megatron.families import YARN
from tests.megatron.memory import assert_planned, kept_by_layers, peaks, plan_of
from tests.megatron.tiny import hf_config
from tests.pool import RankPool

TOKENS = 512
ADAPTERS = LoRA(rank=8)
SPLIT = Layout(tp=2, sequence_parallel=True)
MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2}
SHARED = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
}
SIGMOID = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 0,
    "head_dim": 16,
}
SINKS = {
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": {**YARN, "beta_fast": 32.0, "beta_slow": 1.0},
}
HYBRID = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
LATENT = {
    **SIGMOID,
    "head_dim": 8,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "num_key_value_heads": 8,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "n_group": 1,
    "topk_group": 1,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "gpt2": ("gpt2", {}),
    "mixtral": ("mixtral", MIXTURE),
    "shared_experts": ("qwen2_moe", SHARED),
    "sigmoid_routing": ("glm4_moe", SIGMOID),
    "sinks": ("gpt_oss", {"head_dim": 16, **MIXTURE, **SINKS}),
    "post_norms": ("gemma3_text", {"head_dim": 16, "sliding_window": 64, "layer_types": ["sliding_attention"] * 4}),
    "latent_queries": ("deepseek_v3", {**LATENT, "q_lora_rank": 20, "v_head_dim": 12}),
    "latent_attention": ("deepseek_v3", {**LATENT, "q_lora_rank": None, "v_head_dim": 24}),
    "delta_nets": ("qwen3_5_text", {**HYBRID, "layer_types": ["linear_attention"] * 4}),
    "gated_attention": ("qwen3_5_text", {**HYBRID, "layer_types": ["full_attention"] * 4}),
}


@pytest.mark.dist
@pytest.mark.parametrize(
    ("kind", "dtype", "layout", "recompute", "lora"),
    [
        *(
            ("qwen2", dtype, layout, "none", ADAPTERS)
            for dtype in ("float32", "bfloat16")
            for layout in (Layout(), SPLIT)
        ),
        ("qwen3", "bfloat16", Layout(), "selective", ADAPTERS),
        ("shared_experts", "bfloat16", Layout(), "none", ADAPTERS),
        *((kind, dtype, Layout(), "none", None) for kind in KINDS for dtype in ("float32", "bfloat16")),
        *((kind, "bfloat16", Layout(), "selective", None) for kind in KINDS),
        *(("qwen2", "float32", Layout(), recompute, None) for recompute in ("selective", "full")),
        ("qwen2", "bfloat16", Layout(tp=2), "none", None),
        ("latent_queries", "bfloat16", SPLIT, "none", None),
        ("qwen3", "float32", SPLIT, "none", None),
        ("qwen3", "bfloat16", SPLIT, "selective", None),
        ("qwen3", "bfloat16", SPLIT, "full", None),
    ],
    ids=str,
)
@pytest.mark.parametrize("fused", [False, True], ids=["reference", "fused"])
def test_kept_activations_are_as_planned(
    pool: RankPool, kind: str, dtype: str, layout: Layout, recompute: str, lora: LoRA | None, fused: bool
) -> None:
    """Within 1%: lengths of sequences, and what the router keeps of its choices, are not planned."""
    model_type, fields = KINDS[kind]
    config = hf_config(model_type, **fields, dtype=dtype)
    layers = "n_layer" if kind == "gpt2" else "num_hidden_layers"
    found = pool.run(kept_by_layers, config, layers, layout, recompute, TOKENS, fused, lora, world_size=layout.tp)
    for (two, planned_two), (three, planned_three) in found:
        assert three - two == pytest.approx(planned_three - planned_two, rel=0.01)


SIZES = {
    "num_hidden_layers": 8,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
"""A model of 32 million parameters."""
PACK = 1024


def assert_as_planned(found: dict[str, int], config: dict[str, Any], recompute: str, device: str) -> None:
    plan = plan_of(config, PACK, Layout(), recompute, device)
    update = plan.state + plan.gradients + max(sum(plan.update), plan.stepping)
    assert_planned(found, {"update": update, "inference": plan.state + sum(plan.inference)})


@pytest.mark.dist
def test_process_memory_is_as_planned(tmp_path: Path) -> None:
    """In a separate process, because it changes how the process allocates memory."""
    config, ranks = hf_config("qwen2", **SIZES), RankPool(1)
    try:
        (found,) = ranks.run(peaks, config, PACK, "full", tmp_path, world_size=1, timeout=300)
    finally:
        ranks.close()
    assert_as_planned(found, config, "full", "cpu")
    plan = plan_of(config, PACK, Layout())
    written = plan.state + plan.written
    assert_planned(found, {"checkpoint": written, "copied": written + plan.snapshot})
