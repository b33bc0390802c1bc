"""A Hugging Face directory as a source: where each of its tensors lies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.convert.errors import BrokenError, UsageError
from megarl.convert.stored import BoxReader, StoredTensor
from megarl.convert.torch_file import read_index
from megarl.models import ModelSpec, model_spec
from megarl.weights.hf_files import (
    INDEX_FILE,
    SINGLE_FILE,
    CheckpointError,
    HFDirectory,
    misfits,
    read_config,
    read_weight_map,
    untied,
)
from megarl.weights.shard_map import Box, Manifest, TensorInfo

_SAFETENSORS = (SINGLE_FILE, INDEX_FILE)
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


@dataclass(frozen=True, kw_only=True)
class HFSource:
    """The tensors of a directory.

    Args:
        path: the directory.
        stored: by canonical name.
    """

    path: Path
    stored: Mapping[str, StoredTensor]

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return {name: tensor.info for name, tensor in self.stored.items()}

    @property
    def files(self) -> set[Path]:
        """Those with tensors."""
        return {tensor.path for tensor in self.stored.values()}

    def fitted(self, manifest: Manifest) -> HFSource:
        """The tensors that a manifest asks for, under their canonical names.

        Raises:
            BrokenError: tensors are missing, unknown or of another shape; all of them are listed.
        """
        problems = misfits(self.tensors, manifest) or untied(self.tensors, manifest, self._read)
        if problems:
            raise BrokenError(f"{self.path} does not fit its config.json", problems)
        stored = {manifest.canonical(name): tensor for name, tensor in self.stored.items()}
        return HFSource(path=self.path, stored={name: stored[name] for name in manifest.tensors})

    def _read(self, name: str, box: Box) -> torch.Tensor:
        values = torch.empty(box.shape, dtype=getattr(torch, self.stored[name].info.dtype))
        with BoxReader(values.nbytes) as reader:
            reader.read(self.stored[name], box, values)
        return values


def read_spec(directory: Path) -> ModelSpec:
    """The model that a directory's ``config.json`` describes.

    Raises:
        UsageError: there is none, or no spec describes it.
    """
    try:
        return model_spec(read_config(directory))
    except CheckpointError as error:  # which names the file
        raise UsageError(f"{error}; name a model's directory with --hf") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{directory}: {error}") from None


def open_hf(directory: Path, *, allow_pickle: bool) -> HFSource:
    """Finds the tensors of a directory.

    Args:
        allow_pickle: read ``pytorch_model.bin`` where there is no safetensors file.

    Raises:
        UsageError: it has no tensors, or pickled ones that are not allowed.
        BrokenError: files are missing or damaged; all of them are named.
    """
    if any((directory / name).is_file() for name in _SAFETENSORS):
        return HFSource(path=directory, stored=_safetensors(directory))
    if not any((directory / name).is_file() for name in _PICKLED):
        raise UsageError(f"{directory} has no weights: neither {' nor '.join(_SAFETENSORS)}; choose another --hf")
    if not allow_pickle:
        raise UsageError(
            f"{directory} has weights in pickle files alone, which could run code; convert them to safetensors, "
            "or trust them with --allow-pickle"
        )
    return HFSource(path=directory, stored=_pickled(directory))


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
    weight_map: dict[str, str] = {}
    if index.is_file():
        weight_map = read_weight_map(index)
    stored: dict[str, StoredTensor] = {}
    problems: list[str] = []
    for file in [directory / name for name in sorted(set(weight_map.values()))] or [single]:
        try:
            held = read_index(file)
        except BrokenError as error:
            problems.append(str(error))
            continue
        if not isinstance(held, dict):
            problems.append(f"{file.name} holds a {type(held).__name__}, not tensors by their names")
            continue
        stored |= {name: tensor for name, tensor in held.items() if isinstance(tensor, StoredTensor)}
        lacking = [name for name, of in weight_map.items() if of == file.name and name not in stored]
        problems += [f"{file.name} lacks {name}" for name in lacking]
    if problems:
        raise BrokenError(f"{directory} cannot be read", problems)
    return stored
