"""Tensors in files: where each one is, and how its rows are read."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.checkpoint.utils import _create_file_view  # pyright: ignore[reportPrivateUsage]

from megarl.errors import UsageError
from megarl.models import ModelSpec, model_spec
from megarl.weights.hf_files import CheckpointError, HFDirectory, read_config
from megarl.weights.shard_map import Manifest, TensorInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class SafeTensor:
    """A tensor in a safetensors file."""

    path: Path
    name: str
    info: TensorInfo

    def read_rows(self, first: int, stop: int) -> torch.Tensor:
        """Returns the rows [first, stop) of the first axis; raises CheckpointError where the file cannot be read."""
        with _named_errors(self.path), safe_open(self.path, framework="pt") as reader:
            return reader.get_slice(self.name)[first:stop]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedTensor:
    """A tensor in a file of ``torch.save`` that is a part of another file.

    Args:
        offset: position of the inner file, in bytes.
        nbytes: size of the inner file.
        info: expected tensor; leading axes of 1 may be missing in the inner file.
    """

    path: Path
    offset: int
    nbytes: int
    info: TensorInfo

    def read_rows(self, first: int, stop: int) -> torch.Tensor:
        """Reads the tensor and returns rows of it; raises CheckpointError for another tensor or object."""
        with _named_errors(self.path, f" at byte {self.offset}"), open(self.path, "rb") as file:
            view: Any = _create_file_view(file, self.offset, self.nbytes)
            found: object = torch.load(view, map_location="cpu", weights_only=True)
        if isinstance(found, torch.Tensor) and found.dtype == getattr(torch, self.info.dtype):
            leading = len(self.info.shape) - found.dim()
            if (1,) * leading + tuple(found.shape) == self.info.shape:
                return found.reshape(self.info.shape)[first:stop]
        problem = f"at byte {self.offset} is no {self.info}"
        raise CheckpointError(f"{self.path.name} is corrupted", [problem])


Stored = SafeTensor | ArchivedTensor


def open_hf(directory: Path, manifest: Manifest) -> Mapping[str, Stored]:
    """Returns the tensors of a manifest, by canonical name, in a Hugging Face directory; raises CheckpointError."""
    files = HFDirectory(directory)
    files.check(manifest)
    stored: dict[str, Stored] = {}
    for name, info in files.tensors.items():
        stored[manifest.canonical(name)] = SafeTensor(path=files.file_of[name], name=name, info=info)
    return {name: stored[name] for name in manifest.tensors}


def read_spec(directory: Path) -> ModelSpec:
    """Reads the model that a directory's ``config.json`` describes; raises UsageError where there is none."""
    try:
        return model_spec(read_config(directory))
    except CheckpointError as error:  # which names the file
        raise UsageError(f"{error}; name a model's directory with --hf") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{directory}: {error}") from None


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor."""
    flat: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


@contextmanager
def _named_errors(path: Path, where: str = "") -> Iterator[None]:
    """Raises CheckpointError, with the file's name, for whatever the reading of a damaged file raises."""
    try:
        yield
    except OSError as error:
        reason = f"{error.strerror or error}: {path}"
        raise CheckpointError(f"{path.name} cannot be read", [reason]) from None
    except pickle.UnpicklingError:  # its text advises against weights_only
        reason = f"it is damaged{where}, or holds more than tensors"
        raise CheckpointError(f"{path.name} is corrupted", [reason]) from None
    except Exception as error:
        text, _, _ = str(error).partition("\n")
        reason = f"it is damaged{where}: {text}"
        raise CheckpointError(f"{path.name} is corrupted", [reason]) from None
