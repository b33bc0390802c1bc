"""Tensors in files: where each one is, and how its rows are read.

Files of ``torch.save`` are read with ``weights_only``, which knows tensors and plain containers and
runs no code.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.checkpoint.utils import _create_file_view  # pyright: ignore[reportPrivateUsage]

from megarl.errors import UsageError
from megarl.weights.hf_files import CheckpointError
from megarl.weights.shard_map import TensorInfo


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
        if isinstance(found, torch.Tensor) and info_of(found).dtype == self.info.dtype:
            leading = len(self.info.shape) - found.dim()
            if (1,) * leading + tuple(found.shape) == self.info.shape:
                return found.reshape(self.info.shape)[first:stop]
        problem = f"at byte {self.offset} is no {self.info}"
        raise CheckpointError(f"{self.path.name} is corrupted", [problem])


@dataclass(frozen=True, slots=True, kw_only=True)
class PickledTensor:
    """A tensor in ``pytorch_model.bin`` or in one of the files of its index."""

    path: Path
    name: str
    info: TensorInfo

    def read_rows(self, first: int, stop: int) -> torch.Tensor:
        """Returns the rows [first, stop) of the first axis; raises CheckpointError where the file cannot be read."""
        return read_pickle(self.path)[self.name][first:stop]


Stored = SafeTensor | ArchivedTensor | PickledTensor


def read_pickle(path: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of a file of ``torch.save`` that holds a dictionary of them, mapped into memory.

    Raises CheckpointError where it is damaged, or holds more than tensors and plain containers.
    """
    with _named_errors(path):
        content: Any = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    if not isinstance(content, dict):
        problem = f"it holds a {type(content).__name__}, not tensors by their names"
        raise CheckpointError(f"{path.name} cannot be read", [problem])
    return {name: value.detach() for name, value in content.items() if isinstance(value, torch.Tensor)}


def info_of(tensor: torch.Tensor) -> TensorInfo:
    """Returns the shape of a tensor, and its dtype as text."""
    return TensorInfo(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor."""
    flat: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def copy_values(values: torch.Tensor, target: torch.Tensor, path: Path) -> None:
    """Copies values into a tensor of any dtype.

    Args:
        path: file of the values, for the error.

    Raises:
        UsageError: finite values are too large for the target's dtype.
    """
    target.copy_(values)
    if torch.finfo(target.dtype).max >= torch.finfo(values.dtype).max or not target.isinf().any():
        return
    if (target.isinf() & values.isfinite()).any():
        wider = "bfloat16" if target.dtype == torch.float16 else info_of(values).dtype
        dtype = info_of(target).dtype
        raise UsageError(f"{path.name} has values that {dtype} cannot hold; choose --dtype {wider}")


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
