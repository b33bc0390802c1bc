"""Specs against the files that transformers writes for tiny models: names, shapes, values and config."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
)

from megarl.models import FAMILIES, model_spec
from megarl.types import Layout
from megarl.weights.hf_files import CheckpointError, HFDirectory, load_shard, read_config
from tests.weights import models
from tests.weights.models import (
    deepseek_v2_config,
    deepseek_v3_config,
    gemma3_config,
    glm4_moe_config,
    glm4_moe_lite_config,
    gpt2_config,
    gpt_oss_config,
    llama_config,
    qwen2_moe_config,
    qwen3_5_config,
    qwen3_5_moe_config,
    qwen3_5_whole_config,
    qwen3_next_config,
)

CONFIGS = {name: config() for name, config in models.CONFIGS.items()}
CONFIGS |= {f"{name}-tied": models.CONFIGS[name](tie_word_embeddings=True) for name in ("qwen2", "qwen3", "mixtral")}
CONFIGS["qwen3_5"] = qwen3_5_config()
CONFIGS["qwen2_moe"] = qwen2_moe_config()
CONFIGS["qwen3_next"] = qwen3_next_config()
CONFIGS["deepseek_v2"] = deepseek_v2_config()
CONFIGS["deepseek_v3"] = deepseek_v3_config()
CONFIGS["gemma3"] = gemma3_config()
CONFIGS["gpt_oss"] = gpt_oss_config()
CONFIGS["llama-biased"] = llama_config(attention_bias=True, mlp_bias=True)
CONFIGS["gpt2-untied"] = gpt2_config(tie_word_embeddings=False, n_inner=36)
WITHOUT = {"qwen3_5", "qwen3_5_moe_text", "qwen3_5_moe", "glm4_moe", "glm4_moe_lite"}
"""Families with tests of their own: of whole models, and those without a class with a score head."""


def test_every_family_is_tested() -> None:
    assert {config["model_type"] for config in CONFIGS.values()} | WITHOUT == set(FAMILIES)


def save(directory: Path, config: dict[str, Any], head: str = "lm") -> None:
    fields = {name: value for name, value in config.items() if name != "architectures"}
    make = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    torch.manual_seed(0)
    make.from_config(AutoConfig.for_model(**fields, num_labels=1)).save_pretrained(directory)


@pytest.mark.parametrize("head", ["lm", "score"])
@pytest.mark.parametrize("name", CONFIGS)
def test_tensors_and_configs_equal_those_that_transformers_writes(tmp_path: Path, name: str, head: str) -> None:
    save(tmp_path, CONFIGS[name], head)
    written = HFDirectory(tmp_path).tensors
    spec = model_spec(read_config(tmp_path))  # as transformers writes it, defaults included
    assert spec.head == head
    assert spec.canonical(head) == written
    stated = model_spec(CONFIGS[name])
    assert stated.canonical(head) == written
    assert stated.transformer_fields() == spec.transformer_fields()
    assert stated.gpt_arguments(2) == spec.gpt_arguments(2)
    for other in ("lm", "score"):
        again = model_spec(spec.hf_config(other))
        assert again.head == other
        assert (again.dims, again.dtype, again.tied) == (spec.dims, spec.dtype, spec.tied)
        AutoConfig.for_model(**spec.hf_config(other))


@pytest.mark.parametrize("head", ["lm", "score"])
def test_a_whole_model_has_the_decoders_tensors_and_its_own_config(tmp_path: Path, head: str) -> None:
    config = qwen3_5_whole_config()
    make = AutoModelForImageTextToText if head == "lm" else AutoModelForSequenceClassification
    fields = {name: value for name, value in config.items() if name != "architectures"}
    make.from_config(AutoConfig.for_model(**fields, num_labels=1)).save_pretrained(tmp_path)
    directory = HFDirectory(tmp_path)
    spec = model_spec(read_config(tmp_path))
    assert spec.head == head
    vision = directory.matching(spec.untrained)
    assert vision
    assert {**spec.canonical(head), **vision} == directory.tensors
    directory.check(spec.manifest(head))
    written = spec.hf_config(head)
    assert written["architectures"] == read_config(tmp_path)["architectures"]
    assert written["text_config"]["dtype"] == written["dtype"] == spec.dtype
    decoder = model_spec(qwen3_5_config())
    assert (spec.dims, spec.rope, spec.transformer_fields()) == (
        decoder.dims,
        decoder.rope,
        decoder.transformer_fields(),
    )


@pytest.mark.parametrize("make", [qwen3_5_moe_config, glm4_moe_config, glm4_moe_lite_config])
def test_a_mixture_without_a_score_class_has_the_tensors_that_transformers_writes(
    tmp_path: Path, make: Callable[[], dict[str, Any]]
) -> None:
    save(tmp_path, make())
    spec = model_spec(read_config(tmp_path))
    assert spec.canonical() == HFDirectory(tmp_path).tensors


def test_gpt2_files_without_a_prefix_and_with_masks_are_read(tmp_path: Path) -> None:
    """As the first GPT-2 checkpoints are: the bare model's names, and its causal masks as tensors."""
    save(tmp_path, gpt2_config())
    spec = model_spec(read_config(tmp_path))
    shard_map = spec.megatron_map(Layout(tp=2), 1)
    expected = load_shard(shard_map, tmp_path, spec.manifest())

    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    bare = {name.removeprefix("transformer."): tensor for name, tensor in stored.items()}
    for layer in range(4):
        bare[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 48, 48, dtype=torch.bool).tril()
        bare[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(bare, file)
    actual = load_shard(shard_map, tmp_path, spec.manifest())
    assert actual.keys() == expected.keys()
    assert all(torch.equal(tensor, actual[name]) for name, tensor in expected.items())

    save_file(bare | {"h.0.attn.c_attn.bias": torch.ones(60, dtype=torch.int32)}, file)
    with pytest.raises(CheckpointError, match=r"of another dtype: h\.0\.attn\.c_attn\.bias is I32"):
        HFDirectory(tmp_path).check(spec.manifest())
    save_file(bare | {"transformer.wte.weight": stored["transformer.wte.weight"].clone()}, file)
    with pytest.raises(CheckpointError, match=r"twice: wte\.weight is transformer\.wte\.weight"):
        HFDirectory(tmp_path).check(spec.manifest())
