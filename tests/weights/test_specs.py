"""Refusals of models and layouts, and layers per pipeline stage; test_parity.py of Megatron has the families."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.models import model_spec
from megarl.models.architecture import pipeline_layers
from megarl.types import Layout
from tests.weights.models import (
    gpt2_config,
    llama_config,
    mistral_config,
    mixtral_config,
    qwen2_config,
    qwen3_config,
    qwen3_moe_config,
)


def test_a_value_head_is_not_tied() -> None:
    spec = model_spec(qwen2_config(tie_word_embeddings=True))
    assert spec.gpt_arguments(1)["share_embeddings_and_output_weights"]
    assert not spec.gpt_arguments(1, "value")["share_embeddings_and_output_weights"]


def test_unsupported_models_are_refused_with_all_reasons() -> None:
    config = qwen2_config(use_sliding_window=True, hidden_act="gelu", rope_parameters={"type": "dynamic"}, vocab_size=0)
    with pytest.raises(ValueError, match="model is not supported:") as error:
        model_spec(config)
    for field in ("use_sliding_window", "hidden_act", "rope_type: 'dynamic'", "rope_theta", "vocab_size"):
        assert field in str(error.value)
    with pytest.raises(ValueError, match="OPTForCausalLM is not supported; supported are LlamaForCausalLM"):
        model_spec({"architectures": ["OPTForCausalLM"]})
    with pytest.raises(ValueError, match="attention_bias, mlp_bias"):
        model_spec(llama_config(attention_bias=True))
    with pytest.raises(ValueError, match="contradicts"):
        model_spec(qwen2_config(model_type="llama"))


@pytest.mark.parametrize(
    ("config", "reasons"),
    [
        (mistral_config(sliding_window=0), ["sliding_window: 0 is not a positive integer"]),
        (qwen2_config(sliding_window=8, use_sliding_window=True), ["use_sliding_window: True is not supported"]),
        (
            qwen3_config(attention_bias=True, layer_types=["full_attention", "sliding_attention"]),
            ["attention_bias: True is not supported", "layer_types: sliding_attention"],
        ),
        (
            gpt2_config(activation_function="relu", scale_attn_by_inverse_layer_idx=True, n_head=None),
            [
                "activation_function: 'relu' is not supported (only gelu_new, gelu_pytorch_tanh)",
                "scale_attn_by_inverse_layer_idx: True",
                "n_head: None is not a positive integer",
            ],
        ),
        (mixtral_config(num_experts_per_tok=1), ["num_experts_per_tok: 1 is not supported"]),
        (mixtral_config(num_experts_per_tok=4, router_jitter_noise=0.1), ["4 exceeds the 3", "router_jitter_noise"]),
        (
            qwen3_moe_config(mlp_only_layers=[1, 3], decoder_sparse_step=2, shared_expert_intermediate_size=8),
            ["leave no layer with experts", "shared_expert_intermediate_size: 8"],
        ),
        (llama_config(quantization_config={"bits": 4}, partial_rotary_factor=0.5), ["quantization", "partial_rotary"]),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_unsupported_features_are_refused_by_name(config: dict[str, Any], reasons: list[str]) -> None:
    with pytest.raises(ValueError, match="model is not supported:") as error:
        model_spec(config)
    for reason in reasons:
        assert reason in str(error.value)


def test_layouts_that_do_not_fit_are_refused_with_all_reasons() -> None:
    spec = model_spec(qwen2_config())
    with pytest.raises(
        ValueError, match=r"tp 3 does not divide the 4 attention heads.*2 KV heads.*4 layers.*needs experts"
    ):
        spec.megatron_map(Layout(tp=3, pp=3, vpp=2, dp=2, ep=2), 0)
    with pytest.raises(ValueError, match="tp 3 does not divide"):
        spec.vllm_map(3, 0)
    with pytest.raises(ValueError, match="ep 3 does not divide the 4 experts"):
        model_spec(qwen3_moe_config()).megatron_map(Layout(dp=3, ep=3), 0)
    with pytest.raises(ValueError, match="neither of tp 4 and the 6 KV heads divides the other"):
        model_spec(llama_config(num_attention_heads=12, num_key_value_heads=6)).megatron_map(Layout(tp=4), 0)
    with pytest.raises(ValueError, match="tp 4 exceeds the 3 experts"):
        model_spec(mixtral_config()).vllm_map(4, 0)


def test_the_first_and_last_stages_have_fewer_layers() -> None:
    def sizes(layers: int, **layout: int) -> list[list[int]]:
        of = Layout(**layout)
        return [[len(pipeline_layers(layers, of, stage, chunk)) for stage in range(of.pp)] for chunk in range(of.vpp)]

    assert sizes(126, pp=16) == [[7, *[8] * 14, 7]]
    assert sizes(5, pp=3) == [[2, 2, 1]]
    assert sizes(4, pp=3) == [[1, 2, 1]]
    assert sizes(11, pp=3, vpp=2) == [[2, 2, 2], [2, 2, 1]]
    assert sizes(8, pp=3, vpp=2) == [[1, 1, 1], [2, 2, 1]]


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 4))
def test_stages_are_balanced(layers: int, pp: int, vpp: int) -> None:
    layout = Layout(pp=pp, vpp=vpp)
    chunks = {
        (chunk, stage): pipeline_layers(layers, layout, stage, chunk) for chunk in range(vpp) for stage in range(pp)
    }
    assert [layer for at in sorted(chunks) for layer in chunks[at]] == list(range(layers))
    sizes = {at: len(chunk) for at, chunk in chunks.items()}
    stages: Counter[int] = Counter()
    for (_, stage), size in sizes.items():
        stages[stage] += size
    for spread in (sizes.values(), [stages[stage] for stage in range(pp)]):
        assert max(spread) - min(spread) <= 1
    assert sizes[vpp - 1, pp - 1] == min(sizes.values())
    assert stages[pp - 1] == min(stages.values())
