"""The index of a directory of ``torch.distributed.checkpoint``: which box of which tensor lies where.

``.metadata`` is a pickle. It is read with the few classes that describe tensors, and refused where it needs others.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path, PosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import _get_layout

from megarl.convert.errors import BrokenError
from megarl.convert.torch_file import StoredItem
from megarl.weights.shard_map import ITEM_BYTES, Box, TensorInfo

METADATA = ".metadata"
_FORMAT_VERSION = "1.0.0"
"""As torch writes it (CURRENT_DCP_VERSION of torch/distributed/checkpoint/filesystem.py)."""

_KNOWN: Mapping[str, Mapping[str, Any]] = {
    "torch.distributed.checkpoint.metadata": {
        name: getattr(metadata, name) for name in (*metadata.__all__, "_MEM_FORMAT_ENCODING")
    },
    "torch.distributed.checkpoint.planner": {
        name: getattr(planner, name) for name in ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo": filesystem._StorageInfo},
    # What releases of megatron-core called these: their classes of the same content.
    "megatron.core.dist_checkpointing.strategies.torch": {"MCoreMetadata": Metadata, "MCoreSavePlan": planner.SavePlan},
    "torch.serialization": {"_get_layout": _get_layout},
    "collections": {"OrderedDict": OrderedDict, "defaultdict": defaultdict},
    "builtins": {"list": list, "dict": dict, "set": set},
    "pathlib": {"PosixPath": PosixPath},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where something lies: a file of the directory, and a range of its bytes."""

    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A box of a tensor, stored in one piece.

    Args:
        key: of the tensor.
        box: in the tensor.
        place: of a file of ``torch.save`` with a tensor of the box's shape, maybe without leading axes of 1.
    """

    key: str
    box: Box
    place: Place


@dataclass(frozen=True, kw_only=True)
class Index:
    """What a directory holds.

    Args:
        tensors: by their keys.
        chunks: of all tensors.
        objects: what is not a tensor, by key.
    """

    tensors: Mapping[str, TensorInfo]
    chunks: Sequence[Chunk]
    objects: Mapping[str, Place]

    def write(self, path: Path) -> None:
        """Writes the file that torch and Megatron read."""
        described: dict[str, Any] = {
            key: TensorStorageMetadata(
                properties=TensorProperties(dtype=getattr(torch, info.dtype)), size=torch.Size(info.shape), chunks=[]
            )
            for key, info in self.tensors.items()
        }
        places: dict[MetadataIndex, Any] = {}
        for chunk in self.chunks:
            chunks = described[chunk.key].chunks
            places[MetadataIndex(chunk.key, chunk.box.start, len(chunks))] = _storage_info(chunk.place)
            chunks.append(ChunkStorageMetadata(torch.Size(chunk.box.start), torch.Size(chunk.box.shape)))
        for key, place in self.objects.items():
            described[key] = BytesStorageMetadata()
            places[MetadataIndex(key)] = _storage_info(place)
        held = Metadata(described, planner_data={}, storage_data=places, storage_meta=StorageMeta())
        held.version = _FORMAT_VERSION
        path.write_bytes(pickle.dumps(held))


def read_index(directory: Path) -> Index:
    """Reads ``.metadata`` and compares it with the files that are there.

    Raises:
        BrokenError: it is missing, damaged or refused, or files are missing or too short; all of them are named.
    """
    try:
        held = _Unpickler(BytesIO((directory / METADATA).read_bytes())).load()
        index = _index(held)
    except BrokenError:
        raise
    except OSError as error:
        raise BrokenError(f"{directory} cannot be read", [f"{METADATA}: {error.strerror}"]) from None
    except Exception as error:  # a damaged pickle raises anything
        raise BrokenError(f"{directory} cannot be read", [f"{METADATA} is corrupted: {error!r}"]) from None
    problems = _problems(directory, index)
    if problems:
        raise BrokenError(f"{directory} is broken", problems)
    return index


def stored(directory: Path, index: Index, chunk: Chunk) -> StoredItem:
    """The tensor of a chunk, to be read."""
    info = TensorInfo(chunk.box.shape, index.tensors[chunk.key].dtype)
    place = chunk.place
    return StoredItem(path=directory / place.file, offset=place.offset, nbytes=place.nbytes, info=info)


class _Unpickler(pickle.Unpickler):
    """Makes what describes tensors, and nothing that could run."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if name in _KNOWN.get(module, {}):
            return _KNOWN[module][name]
        raise BrokenError(f"{METADATA} is refused", [f"it needs {module}.{name}, which no index of tensors does"])


def _index(held: Metadata) -> Index:
    places: dict[tuple[str, tuple[int, ...] | None], Place] = {
        (at.fqn, None if at.offset is None else tuple(at.offset)): Place(
            file=info.relative_path, offset=info.offset, nbytes=info.length
        )
        for at, info in held.storage_data.items()
    }
    tensors: dict[str, TensorInfo] = {}
    chunks: list[Chunk] = []
    objects: dict[str, Place] = {}
    for key, entry in held.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            objects[key] = places[key, None]
            continue
        tensors[key] = TensorInfo(tuple(entry.size), str(entry.properties.dtype).removeprefix("torch."))
        for part in entry.chunks:
            start = tuple(part.offsets)
            box = Box(start, tuple(a + n for a, n in zip(start, part.sizes, strict=True)))
            chunks.append(Chunk(key=key, box=box, place=places[key, start]))
    return Index(tensors=tensors, chunks=chunks, objects=objects)


def _problems(directory: Path, index: Index) -> list[str]:
    """What is wrong with the files, and with boxes outside their tensors."""
    problems: list[str] = []
    needed: dict[str, int] = {}
    for place in (*(chunk.place for chunk in index.chunks), *index.objects.values()):
        needed[place.file] = max(needed.get(place.file, 0), place.offset + place.nbytes)
    for name, nbytes in sorted(needed.items()):
        path = directory / name
        if Path(name).name != name:
            problems.append(f"{name} is not a file of this directory")
        elif not path.is_file():
            problems.append(f"{name} is missing")
        elif path.stat().st_size < nbytes:
            problems.append(f"{name} is truncated: it has {path.stat().st_size} of {nbytes} bytes")
    for chunk in index.chunks:
        if not Box.whole(index.tensors[chunk.key].shape).contains(chunk.box):
            problems.append(f"{METADATA} puts {chunk.key}{chunk.box} outside of {index.tensors[chunk.key]}")
    return problems


def _storage_info(place: Place) -> Any:
    return filesystem._StorageInfo(place.file, place.offset, place.nbytes)


def nbytes(info: TensorInfo) -> int:
    """The size of a tensor, of a dtype that weights cannot have too."""
    return torch.Size(info.shape).numel() * (ITEM_BYTES.get(info.dtype) or getattr(torch, info.dtype).itemsize)
