"""Unusual directories and files: refused by name, or read as intended."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.convert.dcp import DCPIndex
from megarl.convert.exporting import compare, export_checkpoint
from megarl.convert.importing import import_checkpoint
from megarl.convert.megatron_checkpoint import _stacked
from megarl.convert.output import OutputFile
from megarl.convert.resources import Resources
from megarl.convert.stored import Assembly
from megarl.errors import UsageError
from megarl.weights.hf_files import CheckpointError, HFDirectory
from megarl.weights.shard_map import Box, TensorInfo
from tests.convert.directories import assert_equal, make_directory, read_directory
from tests.weights import models

INDEX = "model.safetensors.index.json"


def test_gpt2_names_without_the_prefix_are_read(tmp_path: Path) -> None:
    tensors = make_directory(tmp_path / "hf", models.gpt2_config())
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    others = {"h.0.attn.bias": torch.ones(1, 1, 4, 4), "lm_head.weight": bare["wte.weight"].clone()}  # it is tied
    save_file({**bare, **others}, tmp_path / "hf/model.safetensors")
    import_checkpoint(tmp_path / "hf", tmp_path / "ckpt")
    export_checkpoint(tmp_path / "ckpt", tmp_path / "out")
    assert_equal(read_directory(tmp_path / "out"), tensors)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "\x80"])
def test_a_damaged_index_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=f"{INDEX} is corrupted"):
        HFDirectory(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    make_directory(tmp_path / "hf", models.llama_config(), files=2)
    first, last = sorted((tmp_path / "hf").glob("*.safetensors"))
    save_file({**load_file(last), "lm_head.weight": torch.zeros(67, 20)}, last)
    save_file({**load_file(first), "lm_head.weight": torch.ones(67, 20)}, first)
    with pytest.raises(CheckpointError, match=f"lm_head.weight is in {first.name} and in {last.name}"):
        HFDirectory(tmp_path / "hf")


@pytest.mark.process
def test_damage_found_by_a_worker_process_is_named(tmp_path: Path) -> None:
    make_directory(tmp_path / "hf", models.llama_config())
    import_checkpoint(tmp_path / "hf", tmp_path / "ckpt")
    data = tmp_path / "ckpt/release/__0_0.distcp"
    data.write_bytes(bytes(data.stat().st_size))
    two = Resources(processes=2)
    with pytest.raises(CheckpointError, match=r"__\d_0\.distcp is corrupted:\n  it is damaged at byte \d+"):
        export_checkpoint(tmp_path / "ckpt", tmp_path / "out", resources=two, max_file_bytes=4096)


def test_paths_are_resolved_before_they_are_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Name and parents tell what a directory is, from any working directory."""
    tensors = make_directory(tmp_path / "hf", models.llama_config())
    import_checkpoint(tmp_path / "hf", tmp_path / "ckpt")
    monkeypatch.chdir(tmp_path / "ckpt/release")
    export_checkpoint(Path("."), Path("../../out"))
    assert_equal(read_directory(tmp_path / "out"), tensors)
    (tmp_path / "ckpt/release").rename(tmp_path / "elsewhere")
    (tmp_path / "ckpt/release").symlink_to(tmp_path / "elsewhere")
    assert compare(tmp_path / "hf", tmp_path / "ckpt") == (len(tensors), [])
    export_checkpoint(tmp_path / "ckpt/release", tmp_path / "linked")


@pytest.mark.parametrize(
    ("layer", "shape", "dtype"),
    [("1.", (8, 4), "float32"), ("1.", (6, 4), "bfloat16"), ("", (6, 4), "float32")],
)
def test_layers_that_differ_in_shape_or_dtype_are_named(layer: str, shape: tuple[int, int], dtype: str) -> None:
    other = f"decoder.layers.{layer}mlp.linear_fc2.weight"
    first = "decoder.layers.0.mlp.linear_fc2.weight"
    tensors = {first: TensorInfo((6, 4), "float32"), other: TensorInfo(shape, dtype)}
    message = rf"{other} is \[\d, 4\] of \w+, unlike others of decoder.layers.mlp"
    with pytest.raises(CheckpointError, match=message):
        _stacked(DCPIndex(tensors=tensors, chunks=()), layers=True)


def test_gpt_oss_is_refused_in_both_directions(tmp_path: Path) -> None:
    """Gates and ups in turn would load into Megatron-LM, and be wrong there."""
    make_directory(tmp_path / "hf", models.gpt_oss_config())
    with pytest.raises(UsageError, match="checkpoints of gpt_oss are not supported"):
        import_checkpoint(tmp_path / "hf", tmp_path / "out")
    make_directory(tmp_path / "other", models.qwen3_moe_config())
    import_checkpoint(tmp_path / "other", tmp_path / "ckpt")
    with pytest.raises(UsageError, match="checkpoints of gpt_oss are not supported"):
        export_checkpoint(tmp_path / "ckpt", tmp_path / "out", template=tmp_path / "hf")
    assert not (tmp_path / "out").exists()


def test_layers_that_lack_experts_are_refused(tmp_path: Path) -> None:
    """The first layer has four experts, as tensors of their own, and the others have two."""
    make_directory(tmp_path / "hf", models.qwen3_moe_config())
    import_checkpoint(tmp_path / "hf", tmp_path / "ckpt")
    index = DCPIndex.read(tmp_path / "ckpt/release")
    tensors = {key: info for key, info in index.tensors.items() if ".experts." not in key}
    chunks = [chunk for chunk in index.chunks if chunk.key in tensors]
    for chunk in index.chunks:
        layer, expert, *_ = (*chunk.box.start, 0)
        if ".experts." in chunk.key and (layer == 0 or expert < 2):
            key = chunk.key.replace(".layers.", f".layers.{layer}.").replace(".experts.l", f".experts.{expert}.l")
            box = Box.whole(chunk.box.shape[2:])
            tensors[key] = TensorInfo(box.shape, "float32")
            chunks.append(chunk._replace(key=key, box=box))
    DCPIndex(tensors=tensors, chunks=chunks).write(tmp_path / "ckpt/release/.metadata", {})
    missing = r"  0 of 288 elements of model\.layers\.[123]\.mlp\.experts\.[23]\.\w+\.weight are there"
    with pytest.raises(CheckpointError, match=rf"release is broken:(\n{missing}){{18}}$"):
        export_checkpoint(tmp_path / "ckpt", tmp_path / "out")


def test_a_file_that_cannot_be_read_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_directory(tmp_path / "hf", models.llama_config())
    import_checkpoint(tmp_path / "hf", tmp_path / "ckpt")

    def denied(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", denied)
    with pytest.raises(PermissionError, match=r"Permission denied: .*distcp"):
        DCPIndex.read(tmp_path / "ckpt/release")


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/.file.partial").symlink_to("/dev/full")
    assembly = Assembly(tensors={"a": TensorInfo((1 << 18,), "float32")}, copies=(), sources={})
    for header in (None, b"head"):
        with pytest.raises(OSError, match=r"No space left on device \(1.0 MiB needed, .* free\): .*out/.file.partial"):
            OutputFile(path="file", assembly=assembly, header=header).write(tmp_path / "out")
    assert not (tmp_path / "out/file").exists()


def test_elements_that_are_in_no_chunk_are_listed(tmp_path: Path) -> None:
    make_directory(tmp_path / "hf", models.llama_config())
    import_checkpoint(tmp_path / "hf", tmp_path / "ckpt")
    index = DCPIndex.read(tmp_path / "ckpt/release")
    chunks = [chunk for chunk in index.chunks if chunk.key != "decoder.final_layernorm.weight"]
    DCPIndex(tensors=index.tensors, chunks=chunks).write(tmp_path / "ckpt/release/.metadata", {})
    with pytest.raises(
        CheckpointError, match=r"release is broken:\n  0 of 20 elements of model.norm.weight are there$"
    ):
        export_checkpoint(tmp_path / "ckpt", tmp_path / "out")
    assert not (tmp_path / "out").exists()
