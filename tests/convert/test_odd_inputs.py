"""Directories and files that are not quite what they should be: refused by name, or read as they are meant."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.convert.errors import BrokenError
from megarl.convert.exporting import export_checkpoint
from megarl.convert.hf import open_hf
from megarl.convert.importing import import_checkpoint
from megarl.convert.memory import Resources
from megarl.convert.torch_file import read_index
from megarl.weights.files import CheckpointError
from tests.convert.directories import assert_equal, make_directory, read_directory
from tests.weights import models

RESOURCES = Resources(memory=4 << 30, processes=1)
INDEX = "model.safetensors.index.json"


def test_names_without_the_prefix_of_gpt2(tmp_path: Path) -> None:
    tensors = make_directory(tmp_path / "hf", models.gpt2_config())
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file({**bare, "h.0.attn.bias": torch.ones(1, 1, 4, 4)}, tmp_path / "hf/model.safetensors")
    import_checkpoint(tmp_path / "hf", tmp_path / "ckpt", resources=RESOURCES)
    export_checkpoint(tmp_path / "ckpt", tmp_path / "out", resources=RESOURCES)
    assert_equal(read_directory(tmp_path / "out"), tensors)


def test_a_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    tensors = make_directory(tmp_path / "hf", models.gpt2_config())
    name = "transformer.h.1.ln_1.weight"
    twice = {**tensors, name.removeprefix("transformer."): tensors[name] + 1}
    save_file(twice, tmp_path / "hf/model.safetensors")
    with pytest.raises(BrokenError, match=f"twice: h.1.ln_1.weight is {name}"):
        import_checkpoint(tmp_path / "hf", tmp_path / "ckpt", resources=RESOURCES)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    make_directory(tmp_path / "hf", models.llama_config(), files=2)
    first, last = sorted((tmp_path / "hf").glob("*.safetensors"))
    save_file({**load_file(last), "lm_head.weight": torch.zeros(67, 20)}, last)
    save_file({**load_file(first), "lm_head.weight": torch.ones(67, 20)}, first)
    with pytest.raises(CheckpointError, match=f"lm_head.weight is in {first.name} and in {last.name}"):
        import_checkpoint(tmp_path / "hf", tmp_path / "ckpt", resources=RESOURCES)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "\x80"])
@pytest.mark.parametrize("name", [INDEX, "pytorch_model.bin.index.json"])
def test_a_damaged_index_is_named(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=f"{name} is corrupted"):
        open_hf(tmp_path, allow_pickle=True)


def test_an_index_stays_within_its_directory(tmp_path: Path) -> None:
    make_directory(tmp_path / "hf", models.llama_config())
    weight_map = dict.fromkeys(load_file(tmp_path / "hf/model.safetensors"), "../hf/model.safetensors")
    (tmp_path / "hf" / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"names files of other directories: \.\./hf/model.safetensors"):
        open_hf(tmp_path / "hf", allow_pickle=False)


def test_a_pickle_of_something_else_is_named(tmp_path: Path) -> None:
    torch.save([torch.zeros(2)], tmp_path / "pytorch_model.bin")
    with pytest.raises(BrokenError, match=r"pytorch_model.bin holds a list, not tensors by their names"):
        open_hf(tmp_path, allow_pickle=True)


def test_bytes_that_are_wrong_are_never_anything_but_damage(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(3), "b": torch.nn.Parameter(torch.ones(3, 4))}, tmp_path / "file.pt")
    data, chance = (tmp_path / "file.pt").read_bytes(), random.Random(0)
    damaged = 0
    for _ in range(500):
        wrong = bytearray(data)
        for _ in range(3):
            wrong[chance.randrange(len(wrong))] = chance.randrange(256)
        (tmp_path / "file.pt").write_bytes(wrong)
        try:
            read_index(tmp_path / "file.pt")
        except BrokenError as error:
            damaged += "file.pt" in str(error)
    assert damaged > 100
