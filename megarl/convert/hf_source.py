"""A Hugging Face directory as a source: where each of its tensors lies."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megarl.convert.stored import BoxReader, StoredTensor, read_torch_file
from megarl.errors import UsageError
from megarl.models import ModelSpec, model_spec
from megarl.weights import hf_files
from megarl.weights.hf_files import CheckpointError, HFDirectory, read_config, read_weight_map
from megarl.weights.shard_map import ITEM_BYTES, Box, Manifest

_SAFETENSORS = (hf_files.SINGLE_FILE, hf_files.INDEX_FILE)
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def open_hf(directory: Path, manifest: Manifest, *, allow_pickle: bool) -> dict[str, StoredTensor]:
    """Returns the tensors of a manifest, by canonical name, from safetensors or else from pickle files."""
    if any((directory / name).is_file() for name in _SAFETENSORS):
        stored = _safetensors(directory)
    elif not any((directory / name).is_file() for name in _PICKLED):
        raise UsageError(f"{directory} has no weights: neither {' nor '.join(_SAFETENSORS)}; choose another --hf")
    elif not allow_pickle:
        raise UsageError(
            f"{directory} has weights in pickle files alone, which could run code; convert them to safetensors, "
            "or trust them with --allow-pickle"
        )
    else:
        stored = _pickled(directory)
    tensors = {name: tensor.info for name, tensor in stored.items()}
    problems = hf_files.misfits(tensors, manifest)
    problems = problems or hf_files.untied(tensors, manifest, lambda name, box: _read(stored[name], box))
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


def _safetensors(directory: Path) -> dict[str, StoredTensor]:
    checked = HFDirectory(directory)
    stored: dict[str, StoredTensor] = {}
    for file in sorted(set(checked.file_of.values())):
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header: dict[str, Any] = json.loads(stream.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                offset = 8 + length + entry["data_offsets"][0]
                stored[name] = StoredTensor(path=file, offset=offset, info=checked.tensors[name])
    return stored


def _pickled(directory: Path) -> dict[str, StoredTensor]:
    single, index = (directory / name for name in _PICKLED)
    weight_map = read_weight_map(index) if index.is_file() else {}
    files = [directory / name for name in sorted(set(weight_map.values()))] or [single]
    stored = _read_pickles(directory, files, weight_map)
    if files != [single] and single.is_file():
        other = _read_pickles(directory, [single], {})
        copies = [{name: tensor.info for name, tensor in held.items()} for held in (other, stored)]
        hf_files.refuse_other_copy(single, index.name, copies, _differing(other, stored), readers="MegaRL reads")
    return stored


def _differing(a: Mapping[str, StoredTensor], b: Mapping[str, StoredTensor]) -> Iterator[str]:
    for name, tensor in a.items():
        if tensor.info.dtype not in ITEM_BYTES or 0 in tensor.info.shape:
            continue
        if not hf_files.same_bits(tensor.info, lambda box, pair=(tensor, b[name]): tuple(_read(s, box) for s in pair)):
            yield name


def _read(stored: StoredTensor, box: Box) -> torch.Tensor:
    values = torch.empty(box.shape, dtype=getattr(torch, stored.info.dtype))
    with BoxReader(values.nbytes) as reader:
        reader.read(stored, box, values)
    return values


def _read_pickles(directory: Path, files: Sequence[Path], weight_map: Mapping[str, str]) -> dict[str, StoredTensor]:
    stored: dict[str, StoredTensor] = {}
    problems: list[str] = []
    for file in files:
        try:
            content = read_torch_file(file)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        if not isinstance(content, dict):
            problems.append(f"{file.name} holds a {type(content).__name__}, not tensors by their names")
            continue
        stored |= {name: tensor for name, tensor in content.items() if isinstance(tensor, StoredTensor)}
        lacking = [name for name, of in weight_map.items() if of == file.name and name not in stored]
        problems += [f"{file.name} lacks {name}" for name in lacking]
    if problems:
        raise CheckpointError(f"{directory} cannot be read", problems)
    return stored
