"""Edited configs of families with several kinds of layers: refused, or equal to transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.models import model_spec
from megarl.types import Layout
from megarl.weights.hf_files import read_config
from tests.megatron.families import FAMILIES, MIXTURES
from tests.megatron.test_parity import differences, expectations, infer
from tests.pool import RankPool

MODELS = {name: {**FAMILIES, **MIXTURES}[name] for name in ("qwen3_5", "qwen2_moe", "qwen3_next", "qwen3_5_moe")}
MODELS |= {"glm4_moe": MIXTURES["glm4_moe"], **{name: FAMILIES[name] for name in ("gpt2", "gemma3", "mistral", "phi3")}}
MODELS |= {name: MIXTURES[name] for name in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "gpt_oss")}
PHI3_ROPE = FAMILIES["phi3"].fields["rope_parameters"]
HYBRIDS = ("qwen3_5", "qwen3_next", "qwen3_5_moe")
DELTA, FULL, WINDOW = "linear_attention", "full_attention", "sliding_attention"
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
OSS_YARN = {**YARN, "original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0}
LONG_YARN = {**YARN, "original_max_position_embeddings": 32}

REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", {"sliding_window": 3}),
    ("mistral", {"llama_4_scaling": {"beta": 0.1}}),
    ("mistral", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 500.0}}),
    ("mistral", {"sliding_window": 0}),
    ("phi3", {"embd_pdrop": 0.1}),
    ("phi3", {"rope_parameters": {**PHI3_ROPE, "long_factor": [2.0]}}),
    ("phi3", {"rope_parameters": YARN}),
    ("gpt_oss", {"attention_bias": False}),
    ("gpt_oss", {"layer_types": [FULL] * 5}),
    ("gpt_oss", {"layer_types": [FULL, WINDOW, FULL, WINDOW, FULL]}),
    ("gpt_oss", {"num_experts": 4}),
    ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}),
    ("gpt_oss", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    ("gpt_oss", {"rope_parameters": {**OSS_YARN, "attention_factor": 1.5}}),
    ("gpt_oss", {"rope_parameters": {**OSS_YARN, "beta_fast": None}}),
    ("gpt_oss", {"rms_norm_eps": 1e-6}),
    ("gpt_oss", {"rope_parameters": {**OSS_YARN, "truncate": None}}),
    ("gpt_oss", {"sliding_window": None}),
    ("gpt_oss", {"swiglu_alpha": 1.0}),
    ("gpt_oss", {"swiglu_limit": 5.0}),
    ("gpt_oss", {"tie_word_embeddings": True}),
    ("qwen3_5", {"attention_bias": True}),
    ("qwen3_5", {"attention_dropout": 0.5}),
    ("qwen3_5", {"attn_output_gate": False}),
    ("qwen3_5", {"full_attention_interval": 0, "layer_types": None}),
    ("qwen3_5", {"hidden_act": "gelu"}),
    ("qwen3_5", {"layer_scale": True}),
    ("qwen3_5", {"layer_types": [DELTA, FULL]}),
    ("qwen3_5", {"layer_types": [DELTA, FULL, "sliding_attention", DELTA]}),
    ("qwen3_5", {"linear_num_key_heads": 3}),
    ("qwen3_5", {"num_key_value_heads": 3}),
    ("qwen3_5", {"output_gate_type": "sigmoid"}),
    ("qwen3_5", {"quantization_config": {"quant_method": "fp8"}}),
    ("qwen3_5", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}}),
    ("qwen3_5", {"rope_parameters": YARN}),  # 128 positions, rotations for 64
    ("qwen3_5", {"sliding_window": 3}),
    ("qwen2_moe", {"decoder_sparse_step": 6}),
    ("qwen2_moe", {"head_dim": 12}),
    ("qwen2_moe", {"hidden_act": "relu"}),
    ("qwen2_moe", {"mlp_only_layers": "0"}),
    ("qwen2_moe", {"mlp_only_layers": [0, 1, 2, 3, 4]}),
    ("qwen2_moe", {"num_experts_per_tok": 7}),
    ("qwen2_moe", {"qkv_bias": False}),
    ("qwen2_moe", {"shared_expert_intermediate_size": 0}),
    ("qwen2_moe", {"use_sliding_window": True}),
    ("qwen3_next", {"num_experts_per_tok": 1}),
    ("qwen3_next", {"tie_word_embeddings": True}),
    ("qwen3_5_moe", {"decoder_sparse_step": 2}),
    ("qwen3_5_moe", {"mlp_only_layers": [0]}),
    ("qwen3_5_moe", {"norm_topk_prob": False}),
    ("glm4_moe", {"first_k_dense_replace": 5}),
    ("glm4_moe", {"head_dim": None}),
    ("glm4_moe", {"n_group": 2}),
    ("glm4_moe", {"n_shared_experts": 0}),
    ("glm4_moe", {"norm_topk_prob": False}),
    ("glm4_moe", {"num_experts_per_tok": 1}),
    ("glm4_moe", {"num_nextn_predict_layers": 1.5}),
    ("glm4_moe", {"partial_rotary_factor": None}),
    ("gemma3", {"attn_logit_softcapping": 5.0}),
    ("gemma3", {"attention_bias": True}),
    ("gemma3", {"final_logit_softcapping": 5.0}),
    ("gemma3", {"layer_types": [FULL]}),
    ("gemma3", {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}),
    ("gemma3", {"hidden_activation": "gelu_new"}),
    ("gemma3", {"rope_parameters": None, "rope_local_base_freq": None}),
    ("gemma3", {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 8.0}}),
    ("gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    ("gemma3", {"layer_types": None, "sliding_window_pattern": None}),
    ("gemma3", {"use_bidirectional_attention": True}),
    ("deepseek_v2", {"n_group": None}),
    ("deepseek_v2", {"norm_topk_prob": True}),
    ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1}),
    ("deepseek_v3", {"attention_bias": True}),
    ("deepseek_v3", {"head_dim": 4}),
    ("deepseek_v3", {"dtype": "float16"}),
    ("deepseek_v3", {"index_topk": None}),
    ("deepseek_v3", {"index_topk": 4}),
    ("deepseek_v3", {"moe_layer_freq": 2}),
    ("deepseek_v3", {"n_group": 4}),
    ("deepseek_v3", {"num_key_value_heads": 2}),
    ("deepseek_v3", {"q_lora_rank": 0}),
    ("deepseek_v3", {"n_group": 6}),
    ("deepseek_v3", {"n_group": None}),
    ("deepseek_v3", {"num_local_experts": 7}),
    ("deepseek_v3", {"rope_interleave": False}),
    ("deepseek_v3", {"rope_interleave": None}),
    ("deepseek_v3", {"rope_parameters": {**LONG_YARN, "factor": 1.0, "attention_factor": 2.0}}),
    ("deepseek_v3", {"rope_parameters": {**LONG_YARN, "attention_factor": 2.0}}),
    ("deepseek_v3", {"rope_parameters": {**LONG_YARN, "mscale": 0.7}}),
    ("deepseek_v3", {"rope_parameters": {**LONG_YARN, "mscale_all_dim": 0.5}}),
    ("deepseek_v3", {"scoring_func": "softmax"}),
    ("deepseek_v3", {"topk_method": None}),
    ("deepseek_v3", {"v_head_dim": 17}),
    ("glm4_moe_lite", {"first_k_dense_replace": 2, "mlp_layer_types": None}),
    ("glm4_moe_lite", {"first_k_dense_replace": None}),
    ("glm4_moe_lite", {"mlp_layer_types": ["sparse"] * 4}),
    ("glm4_moe_lite", {"scoring_func": "softmax"}),
    ("glm4_moe_lite", {"partial_rotary_factor": 0.5}),
    ("glm4_moe_lite", {"sliding_window": 3}),
    ("glm4_moe", {"sliding_window": 3}),
    ("glm4_moe", {"tie_word_embeddings": True}),
]
EQUAL: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_5", {"attn_logit_softcapping": 5.0}),  # as in transformers and vLLM, without effect
    ("qwen3_5", {"full_attention_interval": 1, "layer_types": None}),
    ("qwen3_5", {"full_attention_interval": 3}),
    ("qwen3_5", {"head_dim": 16}),
    ("qwen3_5", {"layer_types": [FULL] * 4}),
    ("qwen3_5", {"layer_types": [DELTA, FULL, FULL, DELTA]}),
    ("qwen3_5", {"linear_conv_kernel_dim": 1}),
    ("qwen3_5", {"linear_conv_kernel_dim": 6}),
    ("qwen3_5", {"linear_key_head_dim": 12}),
    ("qwen3_5", {"linear_num_key_heads": 4}),
    ("qwen3_5", {"linear_num_value_heads": 2}),
    ("qwen3_5", {"num_key_value_heads": 1}),
    ("qwen3_5", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}}),
    ("qwen3_5", {"rope_parameters": {**YARN, "factor": 8.0, "partial_rotary_factor": 0.5}}),
    ("qwen3_5", {"tie_word_embeddings": True}),
    ("qwen2_moe", {"decoder_sparse_step": 2}),
    ("qwen2_moe", {"mlp_only_layers": [0, 2]}),
    ("qwen2_moe", {"norm_topk_prob": True}),
    ("qwen2_moe", {"num_experts": 1, "num_experts_per_tok": 1}),
    ("qwen2_moe", {"num_experts_per_tok": 1}),
    ("qwen2_moe", {"output_router_logits": True}),
    ("qwen2_moe", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("qwen3_next", {"decoder_sparse_step": 2}),
    ("qwen3_next", {"linear_num_key_heads": 1}),
    ("qwen3_next", {"norm_topk_prob": False}),
    ("qwen3_next", {"partial_rotary_factor": 0.5}),
    ("qwen3_5_moe", {"intermediate_size": 8}),
    ("qwen3_5_moe", {"layer_types": [FULL, DELTA, DELTA, FULL]}),
    ("qwen3_5_moe", {"num_experts_per_tok": 6}),
    ("gemma3", {"layer_types": [FULL] * 6}),
    ("gemma3", {"layer_types": [WINDOW] * 6}),
    ("gemma3", {"layer_types": None, "sliding_window_pattern": 3}),
    ("gemma3", {"query_pre_attn_scalar": 10}),
    ("gemma3", {"rope_parameters": None, "rope_theta": 500.0, "rope_local_base_freq": 50.0}),
    ("gemma3", {"rope_parameters": None, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    ("gemma3", {"sliding_window": 2}),
    ("gemma3", {"tie_word_embeddings": False}),
    ("deepseek_v2", {"first_k_dense_replace": 0}),
    ("deepseek_v2", {"routed_scaling_factor": 1.0}),
    ("deepseek_v3", {"n_group": 3, "topk_group": 1, "num_experts_per_tok": 2}),
    ("mistral", {"rope_parameters": LONG_YARN}),
    ("mistral", {"sliding_window": 1}),
    ("mistral", {"sliding_window": None}),
    ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}}),
    ("phi3", {"sliding_window": None}),
    ("phi3", {"tie_word_embeddings": True}),
    ("gpt_oss", {"head_dim": 8}),
    ("gpt_oss", {"layer_types": None}),
    ("gpt_oss", {"num_experts_per_tok": 2}),
    ("gpt_oss", {"rope_parameters": OSS_YARN}),
    ("gpt_oss", {"sliding_window": 3}),
    ("deepseek_v3", {"q_lora_rank": None}),
    ("deepseek_v3", {"rope_parameters": None, "rope_scaling": {**LONG_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    ("deepseek_v3", {"rope_parameters": {**LONG_YARN, "mscale": 1}}),
    ("deepseek_v3", {"rope_parameters": LONG_YARN}),
    ("deepseek_v3", {"tie_word_embeddings": True}),
    ("deepseek_v3", {"v_head_dim": 16}),
    ("glm4_moe_lite", {"first_k_dense_replace": 2, "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 2}),
    ("glm4_moe_lite", {"num_nextn_predict_layers": 1}),
    ("glm4_moe", {"attention_bias": False}),
    ("glm4_moe", {"first_k_dense_replace": 0}),
    ("glm4_moe", {"n_shared_experts": 1}),
    ("glm4_moe", {"num_nextn_predict_layers": 2}),
    ("glm4_moe", {"partial_rotary_factor": 1.0}),
    ("glm4_moe", {"routed_scaling_factor": 0.5}),
    ("glm4_moe", {"use_qk_norm": False}),
]


_SIZES = {"hidden_size": 32, "max_position_embeddings": 128, "dtype": "float32"}


def _name(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


@pytest.mark.parametrize(("name", "edit"), REFUSED, ids=_name)
def test_an_edited_config_is_refused_by_field(name: str, edit: dict[str, Any]) -> None:
    """Before weights are read: the config has what a family's has, but for the edit."""
    from transformers import AutoConfig

    family = MODELS[name]
    config = AutoConfig.for_model(family.kind, **{**_SIZES, **family.fields}).to_dict()
    model_spec(config)
    with pytest.raises(ValueError, match="is not supported:") as caught:
        model_spec({**config, **edit})
    told = str(caught.value)
    assert any(
        field in told for field in (*edit, "rope_type", "long_factor", "truncate", "max_position_embeddings", "float16")
    )


@pytest.mark.dist
@pytest.mark.parametrize(("name", "edit"), EQUAL, ids=_name)
def test_an_edited_config_that_is_accepted_equals_transformers(
    pool: RankPool, tmp_path: Path, name: str, edit: dict[str, Any]
) -> None:
    fields = dict(edit)
    if name in HYBRIDS:
        fields["rms_norm_eps"] = 0.1  # with less, transformers' own float32 is more than 1e-5 from its float64
    MODELS[name].save(tmp_path, **fields)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | edit))
    model_spec(read_config(tmp_path))
    results = pool.run(infer, tmp_path, Layout(), 40, world_size=1)
    for what, found in differences(results, expectations(tmp_path)).items():
        assert found.max() <= 1e-5, f"{what} differ from transformers by {found.max():.2e}"
