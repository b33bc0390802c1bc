"""From Hugging Face to a Megatron checkpoint and back, without Megatron: bit for bit, for all kinds of files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.convert.exporting import compare, export_checkpoint
from megarl.convert.importing import import_checkpoint
from megarl.convert.resources import Resources
from megarl.errors import UsageError
from megarl.models import model_spec
from megarl.types import Layout
from megarl.weights.hf_files import CheckpointError, load_shard
from tests.convert.directories import Tensors, assert_equal, make_directory, random_tensors, read_directory
from tests.weights import models

CONFIGS = {
    "llama": models.llama_config(tie_word_embeddings=True),
    "qwen2": models.qwen2_config(dtype="bfloat16"),
    "mistral": models.mistral_config(dtype="float16"),
    "qwen3": models.qwen3_config(),
    "gpt2": models.gpt2_config(),
    "mixtral": models.mixtral_config(dtype="bfloat16"),
    "qwen3_moe": models.qwen3_moe_config(tie_word_embeddings=True),
    "phi3": models.phi3_config(),
    "qwen3_5": models.qwen3_5_config(dtype="bfloat16"),
    "qwen3_5_moe": models.qwen3_5_moe_whole_config(dtype="bfloat16"),
    "qwen3_next": models.qwen3_next_config(),
    "deepseek_v2": models.deepseek_v2_config(dtype="bfloat16"),
    "deepseek_v3": models.deepseek_v3_config(),
    "glm4_moe_lite": models.glm4_moe_lite_config(dtype="bfloat16"),
    "reward": models.llama_config(architectures=["LlamaForSequenceClassification"], num_labels=1),
}


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_round_trips(family: str, files: int, tmp_path: Path) -> None:
    tensors = make_directory(tmp_path / "hf", CONFIGS[family], files=files)
    import_checkpoint(tmp_path / "hf", tmp_path / "ckpt")
    assert compare(tmp_path / "hf", tmp_path / "ckpt") == (len(tensors), [])
    export_checkpoint(tmp_path / "ckpt", tmp_path / "out", max_file_bytes=10_000 * files)
    assert_equal(read_directory(tmp_path / "out"), tensors)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()
    assert (tmp_path / "out/tokenizer.json").is_file()
    assert json.loads((tmp_path / "out/generation_config.json").read_text()) == {"eos_token_id": 7}
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["architectures"] == CONFIGS[family]["architectures"]
    assert config["dtype"] == CONFIGS[family].get("dtype", "float32")


@pytest.mark.process
def test_several_files_and_processes_round_trip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are cut by rows, and read back from those cuts into others; two processes share the work."""
    monkeypatch.setattr("megarl.convert.importing._CHUNK_BYTES", 1 << 20)
    tensors = make_directory(tmp_path / "hf", models.gpt2_config(vocab_size=70_001, n_embd=64, n_layer=2))
    two = Resources(processes=2)
    import_checkpoint(tmp_path / "hf", tmp_path / "ckpt", resources=two, max_file_bytes=1 << 20)
    assert len(list((tmp_path / "ckpt/release").glob("*.distcp"))) > 10
    export_checkpoint(tmp_path / "ckpt", tmp_path / "out", resources=two, max_file_bytes=3 << 20)
    assert compare(tmp_path / "out", tmp_path / "ckpt", resources=two) == (len(tensors), [])
    assert_equal(read_directory(tmp_path / "out"), tensors)


def test_casts(tmp_path: Path) -> None:
    tensors = make_directory(tmp_path / "hf", models.qwen3_config())
    import_checkpoint(tmp_path / "hf", tmp_path / "ckpt", dtype="bfloat16")
    export_checkpoint(tmp_path / "ckpt", tmp_path / "out", dtype="float32")
    assert_equal(read_directory(tmp_path / "out"), {name: t.bfloat16().float() for name, t in tensors.items()})
    count, different = compare(tmp_path / "hf", tmp_path / "ckpt")
    assert different[0] == "model.embed_tokens.weight: bfloat16, not float32"
    assert len(different) > count
    assert compare(tmp_path / "hf", tmp_path / "ckpt", dtype="bfloat16") == (count, [])


def test_mixed_dtypes_within_a_model_are_kept(tmp_path: Path) -> None:
    config = models.qwen3_moe_config(dtype="bfloat16")
    tensors = random_tensors(model_spec(config), mlp_gate_weight="float32", norm_weight="float32")
    make_directory(tmp_path / "hf", config, tensors=tensors)
    import_checkpoint(tmp_path / "hf", tmp_path / "ckpt")
    export_checkpoint(tmp_path / "ckpt", tmp_path / "out")
    assert_equal(read_directory(tmp_path / "out"), tensors)
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"


def test_mixed_dtypes_within_a_parameter_need_an_explicit_dtype(tmp_path: Path) -> None:
    config = models.qwen3_config()
    make_directory(tmp_path / "hf", config, tensors=random_tensors(model_spec(config), up_proj_weight="bfloat16"))
    with pytest.raises(
        UsageError, match=r"bfloat16 and float32 together in decoder.layers.mlp.linear_fc1.weight; choose one"
    ):
        import_checkpoint(tmp_path / "hf", tmp_path / "ckpt")


def test_a_value_that_float16_cannot_hold_is_refused(tmp_path: Path) -> None:
    config = models.qwen3_config()
    tensors = random_tensors(model_spec(config))
    tensors["model.norm.weight"][3] = 70_000.0
    make_directory(tmp_path / "hf", config, tensors=tensors)
    with pytest.raises(UsageError, match="values that float16 cannot hold; choose --dtype bfloat16"):
        import_checkpoint(tmp_path / "hf", tmp_path / "ckpt", dtype="float16")


def test_special_values_keep_their_bits(tmp_path: Path) -> None:
    config = models.qwen3_config()
    tensors = random_tensors(model_spec(config))
    odd = torch.tensor([0x7FC00001, -0x80000000, 0x7F800000, 1], dtype=torch.int32).view(torch.float32)
    tensors["model.norm.weight"][:4] = odd
    make_directory(tmp_path / "hf", config, tensors=tensors)
    import_checkpoint(tmp_path / "hf", tmp_path / "ckpt")
    assert compare(tmp_path / "hf", tmp_path / "ckpt")[1] == []


def _untrained(config: dict[str, Any], tensors: Tensors) -> Tensors:
    """A part of a vision tower and of a layer that predicts a further token, or such a layer after the others."""
    if "vision_config" in config:
        vision = torch.randn(8, 3, 2, 2, 2)
        return {"model.visual.patch_embed.proj.weight": vision, "mtp.norm.weight": torch.randn(24).bfloat16()}
    found: Tensors = {
        "model.layers.4.eh_proj.weight": torch.randn(24, 48).bfloat16(),
        "model.layers.4.embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        "model.layers.4.shared_head.norm.weight": torch.randn(24).bfloat16(),
    }
    for name, tensor in tensors.items():
        if name.startswith("model.layers.3."):
            found[name.replace("layers.3", "layers.4")] = torch.rand_like(tensor)
    return found


@pytest.mark.parametrize(
    "config",
    [
        models.qwen3_5_whole_config(dtype="bfloat16"),
        models.glm4_moe_config(dtype="bfloat16", num_nextn_predict_layers=1),
        models.deepseek_v3_config(dtype="bfloat16", num_nextn_predict_layers=1),
    ],
    ids=lambda config: config["model_type"],
)
def test_what_is_not_trained_passes_through(config: dict[str, Any], tmp_path: Path) -> None:
    tensors = random_tensors(model_spec(config))
    untrained = _untrained(config, tensors)
    tensors |= untrained
    make_directory(tmp_path / "hf", config, files=2, tensors=tensors)
    (tmp_path / "hf/preprocessor_config.json").write_text("{}")
    import_checkpoint(tmp_path / "hf", tmp_path / "ckpt", max_file_bytes=200)
    assert compare(tmp_path / "hf", tmp_path / "ckpt") == (len(tensors), [])
    (tmp_path / "hf").rename(tmp_path / "gone")  # the checkpoint has what an export needs
    export_checkpoint(tmp_path / "ckpt", tmp_path / "out")
    assert_equal(read_directory(tmp_path / "out"), tensors)
    assert (tmp_path / "out/preprocessor_config.json").exists()
    written = json.loads((tmp_path / "out/config.json").read_text())
    for field in ("architectures", "vision_config", "num_nextn_predict_layers"):
        assert written.get(field) == config.get(field)
    for file in (tmp_path / "ckpt/hf").glob("*.safetensors*"):
        file.unlink()
    assert compare(tmp_path / "gone", tmp_path / "ckpt")[1] == [f"{name}: missing in hf" for name in sorted(untrained)]
    with pytest.raises(UsageError, match="has no weights, and tensors that are not trained come from it"):
        export_checkpoint(tmp_path / "ckpt", tmp_path / "again", template=tmp_path / "ckpt/hf")


def _with_stacked_experts(tensors: Tensors, experts: int) -> Tensors:
    """The tensors as published files of Qwen3.5 have them: those of all experts of a layer in two."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        module, is_expert, rest = name.partition(".mlp.experts.")
        if not is_expert:
            found[name] = tensor
        elif rest == "0.gate_proj.weight":
            of = [f"{module}.mlp.experts.{expert}." for expert in range(experts)]
            gates_and_ups = [
                torch.cat([tensors[f"{each}{part}_proj.weight"] for part in ("gate", "up")]) for each in of
            ]
            found[f"{module}.mlp.experts.gate_up_proj"] = torch.stack(gates_and_ups)
            found[f"{module}.mlp.experts.down_proj"] = torch.stack([tensors[f"{each}down_proj.weight"] for each in of])
    return found


def test_the_experts_of_a_layer_may_be_in_two_tensors(tmp_path: Path) -> None:
    config = models.qwen3_5_moe_whole_config(dtype="bfloat16")
    spec = model_spec(config)
    tensors = random_tensors(spec)
    make_directory(tmp_path / "single", config, tensors=tensors)
    stacked = _with_stacked_experts(tensors, 4)
    assert len(stacked) < len(tensors)
    make_directory(tmp_path / "stacked", config, files=2, tensors=stacked)
    import_checkpoint(tmp_path / "stacked", tmp_path / "ckpt")
    assert compare(tmp_path / "single", tmp_path / "ckpt") == (len(tensors), [])
    assert compare(tmp_path / "stacked", tmp_path / "ckpt") == (len(tensors), [])
    export_checkpoint(tmp_path / "ckpt", tmp_path / "out")
    assert_equal(read_directory(tmp_path / "out"), tensors)
    layout = Layout(tp=2, dp=2, ep=2, sequence_parallel=True)
    for rank in range(layout.world_size):
        shard_map = spec.megatron_map(layout, rank)
        loaded = [load_shard(shard_map, tmp_path / name, spec.manifest()) for name in ("single", "stacked")]
        assert_equal(loaded[1], loaded[0])


def test_stacked_experts_of_another_shape_are_refused(tmp_path: Path) -> None:
    config = models.qwen3_5_moe_whole_config(dtype="bfloat16")
    tensors = random_tensors(model_spec(config))
    stacked = _with_stacked_experts(tensors, 3)
    twice = "model.language_model.layers.0.mlp.experts.1.down_proj.weight"
    make_directory(tmp_path / "hf", config, tensors={**stacked, twice: tensors[twice]})
    with pytest.raises(CheckpointError) as caught:
        import_checkpoint(tmp_path / "hf", tmp_path / "ckpt")
    text = str(caught.value)
    assert "misshapen: model.language_model.layers.0.mlp.experts.down_proj is [3, 24, 12], not [4, 24, 12]" in text
    assert f"twice: {twice} is in model.language_model.layers.0.mlp.experts.down_proj" in text
