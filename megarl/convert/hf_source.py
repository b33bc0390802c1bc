"""A Hugging Face directory as a source: its model, and the place of each tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from megarl.convert.stored import PickledTensor, SafeTensor, Stored, info_of, read_pickle
from megarl.errors import UsageError
from megarl.models import ModelSpec, model_spec
from megarl.weights import hf_files
from megarl.weights.hf_files import CheckpointError, HFDirectory, read_config, read_weight_map
from megarl.weights.shard_map import Box, Manifest

_SAFETENSORS = (hf_files.SINGLE_FILE, hf_files.INDEX_FILE)
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def open_hf(directory: Path, manifest: Manifest, *, allow_pickle: bool) -> Mapping[str, Stored]:
    """Returns the tensors of a manifest, by canonical name, from safetensors or else from pickle files."""
    stored: Mapping[str, Stored]
    if _has_one(directory, _SAFETENSORS):
        stored = _safetensors(directory)
    elif not _has_one(directory, _PICKLED):
        files = " nor ".join(_SAFETENSORS)
        raise UsageError(f"{directory} has no weights: neither {files}; choose another --hf")
    elif allow_pickle:
        stored = _pickled(directory)
    else:
        problem = f"{directory} has weights in pickle files alone, which could run code"
        fix = "convert them to safetensors, or trust them with --allow-pickle"
        raise UsageError(f"{problem}; {fix}")
    tensors = {name: tensor.info for name, tensor in stored.items()}
    problems = hf_files.misfits(tensors, manifest)
    if not problems:
        problems = hf_files.untied(tensors, manifest, lambda name, box: _read_box(stored[name], box))
    if problems:
        raise CheckpointError(f"{directory} does not fit its config.json", problems)
    by_canonical = {manifest.canonical(name): tensor for name, tensor in stored.items()}
    return {name: by_canonical[name] for name in manifest.tensors}


def read_spec(directory: Path) -> ModelSpec:
    """Reads the model that a directory's ``config.json`` describes; raises UsageError where there is none."""
    try:
        return model_spec(read_config(directory))
    except CheckpointError as error:  # which names the file
        raise UsageError(f"{error}; name a model's directory with --hf") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{directory}: {error}") from None


def _has_one(directory: Path, names: Sequence[str]) -> bool:
    return any((directory / name).is_file() for name in names)


def _safetensors(directory: Path) -> dict[str, SafeTensor]:
    files = HFDirectory(directory)
    stored: dict[str, SafeTensor] = {}
    for name, info in files.tensors.items():
        stored[name] = SafeTensor(path=files.file_of[name], name=name, info=info)
    return stored


def _pickled(directory: Path) -> dict[str, PickledTensor]:
    single = directory / _PICKLED[0]
    index = directory / _PICKLED[1]
    if single.is_file() and index.is_file():
        places = f"in {single.name} and in files of {index.name}"
        raise CheckpointError(f"{directory} has its weights twice, {places}; remove one of the two")
    weight_map = read_weight_map(index) if index.is_file() else {}
    stored: dict[str, PickledTensor] = {}
    problems: list[str] = []
    for name in sorted(set(weight_map.values())) or [single.name]:
        try:
            tensors = read_pickle(directory / name)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        for key, tensor in tensors.items():
            stored[key] = PickledTensor(path=directory / name, name=key, info=info_of(tensor))
        for key, file in weight_map.items():
            if file == name and key not in tensors:
                problems.append(f"{name} lacks {key}")
    if problems:
        raise CheckpointError(f"{directory} cannot be read", problems)
    return stored


def _read_box(stored: Stored, box: Box) -> torch.Tensor:
    rows = stored.read_rows(box.start[0], box.stop[0])
    return rows[:, *box.slices[1:]]
