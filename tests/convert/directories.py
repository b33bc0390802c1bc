"""Hugging Face directories with random weights, and comparisons with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from megarl.models import ModelSpec, model_spec

Tensors = dict[str, torch.Tensor]


def random_tensors(spec: ModelSpec, seed: int = 0, **dtypes: str) -> Tensors:
    """The model's tensors, all different, with dtypes by the ends of names (_ for dots)."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, info in spec.canonical(spec.head).items():
        other = [dtype for end, dtype in dtypes.items() if name.replace(".", "_").endswith(end)]
        tensor = torch.randn(info.shape, generator=generator)
        if name.endswith("linear_attn.norm.weight"):  # near 1, so that 1 less has as many digits in 16 bits
            tensor = 0.5 + torch.rand(info.shape, generator=generator)
        tensors[name] = tensor.to(getattr(torch, *other or [info.dtype]))
    return tensors


def make_directory(path: Path, config: dict[str, Any], *, files: int = 1, tensors: Tensors | None = None) -> Tensors:
    """Writes a directory with some files of tensors, as other programs do; returns the tensors."""
    tensors = random_tensors(model_spec(config)) if tensors is None else tensors
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text('{"eos_token_id": 7}')
    (path / "tokenizer.json").write_text('{"version": "1.0"}')
    if files == 1:
        save_file(tensors, path / "model.safetensors")
        return tensors
    names = [f"model-{i + 1:05d}-of-{files:05d}.safetensors" for i in range(files)]
    file_of = {name: names[i * files // len(tensors)] for i, name in enumerate(tensors)}
    for file in names:
        save_file({name: tensors[name] for name in tensors if file_of[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": file_of}))
    return tensors


def read_directory(path: Path) -> Tensors:
    """All tensors of a directory, by an independent reader."""
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_equal(found: Tensors, expected: Tensors) -> None:
    """Bit for bit, names and dtypes too."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name], tensor), name
