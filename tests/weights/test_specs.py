"""Specs against transformers' own models, and against fused weights built by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from megarl.types import Layout
from megarl.weights.regions import ShardMap
from megarl.weights.specs import UnsupportedModelError, model_spec
from tests.weights.models import Arrays, held, llama_config, numbered, qwen2_config

CONFIGS = {
    "qwen2": qwen2_config(),
    "qwen2-tied": qwen2_config(tie_word_embeddings=True),
    "llama": llama_config(),
    "llama-biased": llama_config(attention_bias=True, mlp_bias=True),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_canonical_tensors_are_those_of_transformers(config: dict[str, Any]) -> None:
    fields = {name: value for name, value in config.items() if name != "architectures"}
    hf = AutoConfig.for_model(**fields, num_labels=1)
    spec = model_spec(config)
    with torch.device("meta"):
        for head, model in {
            "lm": AutoModelForCausalLM.from_config(hf),
            "score": AutoModelForSequenceClassification.from_config(hf),
        }.items():
            expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
            assert {name: info.shape for name, info in spec.canonical(head).items()} == expected


def megatron_by_hand(config: dict[str, Any], hf: Arrays, tp: int, rank: int, layer: int) -> Arrays:
    """Megatron's fused tensors of a layer on one TP rank, by reshaping and chunking whole tensors."""
    groups, heads = config["num_key_value_heads"], config["num_attention_heads"]
    prefix = f"model.layers.{layer}."

    def chunk(array: np.ndarray, axis: int = 0) -> np.ndarray:
        return np.split(array, tp, axis)[rank]

    def fused_qkv(kind: str) -> np.ndarray:
        q, k, v = (hf[f"{prefix}self_attn.{name}_proj.{kind}"] for name in "qkv")
        head_dim = q.shape[0] // heads
        grouped = [x.reshape(groups, -1, head_dim, *x.shape[1:]) for x in (q, k, v)]
        return chunk(np.concatenate(grouped, axis=1).reshape(-1, *q.shape[1:]))

    def gate_up(kind: str) -> np.ndarray:
        return np.concatenate([chunk(hf[f"{prefix}mlp.{name}_proj.{kind}"]) for name in ("gate", "up")])

    arrays = {
        "input_layernorm.weight": hf[f"{prefix}input_layernorm.weight"],
        "self_attention.linear_qkv.weight": fused_qkv("weight"),
        "self_attention.linear_proj.weight": chunk(hf[f"{prefix}self_attn.o_proj.weight"], 1),
        "pre_mlp_layernorm.weight": hf[f"{prefix}post_attention_layernorm.weight"],
        "mlp.linear_fc1.weight": gate_up("weight"),
        "mlp.linear_fc2.weight": chunk(hf[f"{prefix}mlp.down_proj.weight"], 1),
    }
    if config["model_type"] == "qwen2" or config.get("attention_bias"):
        arrays["self_attention.linear_qkv.bias"] = fused_qkv("bias")
    if config.get("attention_bias"):
        arrays["self_attention.linear_proj.bias"] = hf[f"{prefix}self_attn.o_proj.bias"]
        arrays["mlp.linear_fc1.bias"] = gate_up("bias")
        arrays["mlp.linear_fc2.bias"] = hf[f"{prefix}mlp.down_proj.bias"]
    return arrays


def padded(array: np.ndarray, rows: int) -> np.ndarray:
    return np.concatenate([array, np.zeros((rows - len(array), *array.shape[1:]), array.dtype)])


def assert_holds(shard: ShardMap, hf: Arrays, expected: Arrays) -> None:
    actual = held(shard, hf)
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(actual[name], array, err_msg=name)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(
    "layout", [Layout(), Layout(tp=2, dp=2), Layout(tp=2, pp=2), Layout(pp=2, vpp=2)], ids=["1", "tp", "tp-pp", "vpp"]
)
@pytest.mark.parametrize("head", ["lm", "value"])
def test_megatron_maps_are_megatrons_fused_weights(config: dict[str, Any], layout: Layout, head: str) -> None:
    spec = model_spec(config)
    hf = numbered(spec.canonical(head))
    tied = config["tie_word_embeddings"] and head == "lm"
    for rank in range(layout.world_size):
        at = layout.coords(rank)
        rows = spec.padded_vocab(layout.tp)
        assert rows % (64 * layout.tp) == 0
        assert 0 <= rows - config["vocab_size"] < 64 * layout.tp

        def vocab(name: str, rows: int = rows, tp: int = at.tp) -> np.ndarray:
            return np.split(padded(hf[name], rows), layout.tp)[tp]

        expected: Arrays = {}
        if at.pp == 0:
            expected["0:embedding.word_embeddings.weight"] = vocab("model.embed_tokens.weight")
        per_chunk = 4 // (layout.pp * layout.vpp)
        for chunk in range(layout.vpp):
            for i in range(per_chunk):
                layer = (chunk * layout.pp + at.pp) * per_chunk + i
                fused = megatron_by_hand(config, hf, layout.tp, at.tp, layer)
                expected |= {f"{chunk}:decoder.layers.{i}.{name}": array for name, array in fused.items()}
        if at.pp == layout.pp - 1:
            last = layout.vpp - 1
            expected[f"{last}:decoder.final_layernorm.weight"] = hf["model.norm.weight"]
            output = f"{last}:output_layer.weight"
            if head == "value":
                expected[output] = hf["score.weight"]
            elif not tied:
                expected[output] = vocab("lm_head.weight")
            elif layout.pp > 1:
                expected[output] = vocab("model.embed_tokens.weight")
        assert_holds(spec.megatron_map(layout, rank, head), hf, expected)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_vllm_maps_are_vllms_fused_weights(config: dict[str, Any], tp: int) -> None:
    spec = model_spec(config)
    hf = numbered(spec.canonical())
    kv_heads, rows = config["num_key_value_heads"], -(-config["vocab_size"] // 64) * 64
    biases = [kind for kind in ("weight", "bias") if f"model.layers.0.self_attn.q_proj.{kind}" in hf]
    for rank in range(tp):
        expected = {"model.embed_tokens.weight": np.split(padded(hf["model.embed_tokens.weight"], rows), tp)[rank]}
        for i in range(4):
            prefix = f"model.layers.{i}."
            for kind in biases:
                q, k, v = (hf[f"{prefix}self_attn.{name}_proj.{kind}"] for name in "qkv")
                kv = [np.split(x, min(tp, kv_heads))[rank * min(tp, kv_heads) // tp] for x in (k, v)]
                expected[f"{prefix}self_attn.qkv_proj.{kind}"] = np.concatenate([np.split(q, tp)[rank], *kv])
            for kind in ("weight", "bias"):
                if f"{prefix}mlp.gate_proj.{kind}" in hf:
                    parts = [np.split(hf[f"{prefix}mlp.{name}_proj.{kind}"], tp)[rank] for name in ("gate", "up")]
                    expected[f"{prefix}mlp.gate_up_proj.{kind}"] = np.concatenate(parts)
            for name in ("self_attn.o_proj", "mlp.down_proj"):
                expected[f"{prefix}{name}.weight"] = np.split(hf[f"{prefix}{name}.weight"], tp, axis=1)[rank]
                if f"{prefix}{name}.bias" in hf:
                    expected[f"{prefix}{name}.bias"] = hf[f"{prefix}{name}.bias"]
            for name in ("input_layernorm", "post_attention_layernorm"):
                expected[f"{prefix}{name}.weight"] = hf[f"{prefix}{name}.weight"]
        expected["model.norm.weight"] = hf["model.norm.weight"]
        if "lm_head.weight" in hf:
            expected["lm_head.weight"] = np.split(padded(hf["lm_head.weight"], rows), tp)[rank]
        assert_holds(spec.vllm_map(tp, rank), hf, expected)


def test_parameters_of_a_module_are_loaded_together() -> None:
    shard = model_spec(CONFIGS["llama-biased"]).vllm_map(2, 0)
    modules = [name.rpartition(".")[0] for name in shard.params]
    starts = [module for i, module in enumerate(modules) if i == 0 or modules[i - 1] != module]
    assert len(starts) == len(set(starts))


def test_megatron_arguments() -> None:
    arguments = model_spec(CONFIGS["qwen2-tied"]).transformer(2)
    assert arguments.transformer["num_query_groups"] == 2
    assert arguments.transformer["kv_channels"] == 6
    assert arguments.transformer["add_qkv_bias"]
    assert not arguments.transformer["add_bias_linear"]
    assert arguments.gpt["vocab_size"] == 256
    assert arguments.gpt["share_embeddings_and_output_weights"]
    assert not model_spec(CONFIGS["qwen2-tied"]).transformer(2, "value").gpt["share_embeddings_and_output_weights"]


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_llama3_rope_is_read_from_new_and_old_configs(key: str) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = llama_config(**{key: scaling | ({"rope_theta": 5e5} if key == "rope_parameters" else {})})
    config["rope_theta"] = 5e5 if key == "rope_scaling" else None
    gpt = model_spec(config).transformer(1).gpt
    assert (gpt["rotary_base"], gpt["rope_scaling"], gpt["rope_scaling_factor"]) == (5e5, True, 32.0)

    config[key] = scaling | {"low_freq_factor": 2.0, "factor": None}
    with pytest.raises(UnsupportedModelError, match=r"low_freq_factor: 2\.0.*\n  factor: None"):
        model_spec(config)


def test_unsupported_models_are_refused_with_all_reasons() -> None:
    config = qwen2_config(use_sliding_window=True, hidden_act="gelu", rope_parameters={"type": "yarn"}, vocab_size=0)
    with pytest.raises(UnsupportedModelError) as error:
        model_spec(config)
    for field in ("use_sliding_window", "hidden_act", "rope_type: yarn", "rope_theta", "vocab_size"):
        assert field in str(error.value)
    with pytest.raises(UnsupportedModelError, match="OPTForCausalLM is not supported; supported are LlamaForCausalLM"):
        model_spec({"architectures": ["OPTForCausalLM"]})
    with pytest.raises(UnsupportedModelError, match="attention_bias, mlp_bias"):
        model_spec(llama_config(attention_bias=True))
    with pytest.raises(UnsupportedModelError, match="contradicts"):
        model_spec(qwen2_config(model_type="llama"))


def test_layouts_that_do_not_fit_are_refused_with_all_reasons() -> None:
    spec = model_spec(qwen2_config())
    with pytest.raises(
        ValueError, match=r"tp 3 does not divide the 4 attention heads.*2 KV heads.*4 layers.*needs experts"
    ):
        spec.megatron_map(Layout(tp=3, pp=3, vpp=2, dp=2, ep=2), 0)
    with pytest.raises(ValueError, match="tp 3 does not divide"):
        spec.vllm_map(3, 0)
