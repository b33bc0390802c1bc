"""HF directories written by transformers, read by shards, written by shards, read by transformers."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from megarl.models import model_spec
from megarl.types import Layout
from megarl.weights.export import create_files, export_plan, export_weights, lay_out
from megarl.weights.hf_files import CheckpointError, HFDirectory, load_shard, read_config
from tests.disk import SmallDisk
from tests.weights.models import llama_config, qwen2_config


def save_model(directory: Path, config: dict[str, Any], *, shard: str = "5GB", score: bool = False) -> Any:
    torch.manual_seed(0)
    fields = {name: value for name, value in config.items() if name != "architectures"}
    make = AutoModelForSequenceClassification if score else AutoModelForCausalLM
    model = make.from_config(AutoConfig.for_model(**fields, num_labels=1))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.save_pretrained(directory, max_shard_size=shard)
    return model


def round_trip(source: Path, target: Path, layout: Layout, head: str, *, max_file_bytes: int = 5 * 10**9) -> None:
    """Import into every rank of a layout, export from all of them at once."""
    spec = model_spec(read_config(source))
    maps = [spec.megatron_map(layout, rank, head) for rank in range(layout.world_size)]
    tensors = spec.canonical(head)
    transfer = export_plan(maps, tensors)
    barrier = threading.Barrier(layout.world_size)

    def run(rank: int) -> None:
        export_weights(
            target,
            tensors,
            transfer.senders.get(rank),
            load_shard(maps[rank], source, spec.manifest(head)),
            config=spec.hf_config(head),
            template=source,
            lead=rank == 0,
            barrier=lambda: barrier.wait(120) and None,
            max_file_bytes=max_file_bytes,
        )

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(layout.world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(150)


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, pp=2, dp=2), Layout(pp=2, vpp=2)], ids=["1", "222", "vpp"])
@pytest.mark.parametrize(
    "config",
    [qwen2_config(tie_word_embeddings=True), llama_config(attention_bias=True, mlp_bias=True)],
    ids=["qwen2-tied", "llama-biased"],
)
def test_import_and_export_are_bit_exact(tmp_path: Path, config: dict[str, Any], layout: Layout) -> None:
    model = save_model(tmp_path / "in", config, shard="10KB")
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 1

    round_trip(tmp_path / "in", tmp_path / "out", layout, "lm", max_file_bytes=20_000)

    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.dtype == torch.float32
    expected, actual = model.state_dict(), again.state_dict()
    assert expected.keys() == actual.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, actual[name]), name
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert not (tmp_path / ".out.partial").exists()


def test_a_single_file_and_a_score_head(tmp_path: Path) -> None:
    model = save_model(tmp_path / "in", qwen2_config(), score=True)
    round_trip(tmp_path / "in", tmp_path / "out", Layout(tp=2, pp=2), "score")
    assert [path.name for path in (tmp_path / "out").glob("*.safetensors")] == ["model.safetensors"]
    again, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert again.config.num_labels == 1
    assert not info["missing_keys"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_loading_casts_and_fills_padding_with_zero(tmp_path: Path) -> None:
    model = save_model(tmp_path / "in", qwen2_config())
    spec = model_spec(read_config(tmp_path / "in"), dtype="bfloat16")
    params = load_shard(spec.vllm_map(2, 1), tmp_path / "in", spec.manifest())
    embedding = params["model.embed_tokens.weight"]
    assert embedding.dtype == torch.bfloat16
    assert torch.equal(embedding[:35], model.model.embed_tokens.weight[96:131].bfloat16())
    assert not embedding[35:].any()


def test_a_new_head_is_left_to_the_caller(tmp_path: Path) -> None:
    save_model(tmp_path / "in", qwen2_config())
    spec = model_spec(read_config(tmp_path / "in"))
    shard_map = spec.megatron_map(Layout(), 0, "value")
    with pytest.raises(CheckpointError, match=r"missing: score\.weight \[1, 24\]"):
        load_shard(shard_map, tmp_path / "in", spec.manifest("value"))
    params = load_shard(shard_map, tmp_path / "in", spec.manifest("value", new_head=True))
    assert shard_map.params.keys() - params.keys() == {"0:output_layer.weight"}


def test_all_mismatches_are_listed(tmp_path: Path) -> None:
    save_model(tmp_path / "in", qwen2_config())
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.norm.weight"] = torch.zeros(3)
    tensors["model.layers.0.self_attn.q_norm.weight"] = torch.zeros(6)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(3)
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    spec = model_spec(read_config(tmp_path / "in"))
    with pytest.raises(CheckpointError) as error:
        load_shard(spec.megatron_map(Layout(), 0), tmp_path / "in", spec.manifest())
    assert [line.strip() for line in str(error.value).splitlines()[1:]] == [
        "missing: model.layers.1.mlp.up_proj.weight [40, 24]",
        "misshapen: model.norm.weight is [3], not [24]",
        "unknown: model.layers.0.self_attn.q_norm.weight [6]",
    ]


def test_broken_directories_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        HFDirectory(tmp_path)
    save_model(tmp_path / "in", qwen2_config(), shard="10KB")
    index = json.loads((tmp_path / "in" / "model.safetensors.index.json").read_text())
    first, second, *_ = sorted(set(index["weight_map"].values()))
    (tmp_path / "in" / first).unlink()
    (tmp_path / "in" / second).write_bytes(b"\x10\0\0\0\0\0\0\0garbage")
    with pytest.raises(CheckpointError, match=rf"{first} is missing\n  {second} is corrupted"):
        HFDirectory(tmp_path / "in")


def test_an_interrupted_export_looks_unfinished_and_can_be_repeated(tmp_path: Path) -> None:
    save_model(tmp_path / "in", qwen2_config())
    spec = model_spec(read_config(tmp_path / "in"))
    create_files(tmp_path / ".out.partial", lay_out(spec.canonical()))
    assert not (tmp_path / "out").exists()
    round_trip(tmp_path / "in", tmp_path / "out", Layout(), "lm")
    assert (tmp_path / "out" / "config.json").is_file()


def test_no_rank_of_an_export_overwrites_files_or_waits_for_a_failed_one(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("precious")
    tensors = model_spec(qwen2_config()).canonical()
    barrier = threading.Barrier(3)

    def wait() -> None:
        barrier.wait(120)

    def run(rank: int) -> None:
        with pytest.raises(FileExistsError, match="does not overwrite"):
            export_weights(tmp_path / "out", tensors, None, {}, config={}, template=None, lead=rank == 0, barrier=wait)

    with ThreadPoolExecutor(3) as executor:
        list(executor.map(run, range(3)))
    assert not barrier.broken
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "config.json").read_text() == "precious"


def test_an_output_layer_beside_a_tied_embedding_must_equal_it(tmp_path: Path) -> None:
    config = llama_config(tie_word_embeddings=True)
    spec = model_spec(config)
    tensors = {name: torch.randn(info.shape) for name, info in spec.canonical().items()}
    head = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, tmp_path / "model.safetensors")
    load_shard(spec.megatron_map(Layout(), 0), tmp_path, spec.manifest())
    head[-1, -1] += 1
    save_file({**tensors, "lm_head.weight": head}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"untied: lm_head.weight differs from model.embed_tokens.weight"):
        load_shard(spec.megatron_map(Layout(), 0), tmp_path, spec.manifest())
    load_shard(spec.megatron_map(Layout(), 0, "value"), tmp_path, spec.manifest("value", new_head=True))


@pytest.mark.process
def test_a_full_disk_is_named_before_anything_is_written(tmp_path: Path) -> None:
    spec = model_spec(qwen2_config(vocab_size=3001))
    with SmallDisk(tmp_path / "disk", 400) as disk:
        files = lay_out(spec.canonical(), max_file_bytes=100_000)
        with pytest.raises(OSError, match=r"No space left on device \(.* KiB needed, .* free\): '.*/model-0000\d-of"):
            create_files(disk.path / "out", files)
        assert not list(disk.path.iterdir())


def test_weights_that_are_there_twice_are_refused(tmp_path: Path) -> None:
    """transformers would read the single file, and MegaRL and vLLM those of the index."""
    save_model(tmp_path, qwen2_config(), shard="10KB")
    names = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    save_file({name: torch.zeros(1) for name in names}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has its weights twice, in model.safetensors.*; remove one of the two"):
        HFDirectory(tmp_path)
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert set(HFDirectory(tmp_path).file_of.values()) == {tmp_path / "model.safetensors"}
