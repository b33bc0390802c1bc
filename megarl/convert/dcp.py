"""The index of a directory of ``torch.distributed.checkpoint``: the place of each box of a tensor."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import add
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from megarl.files import write_errors
from megarl.weights.dcp_metadata import METADATA, read_metadata
from megarl.weights.hf_files import CheckpointError
from megarl.weights.shard_map import Box, TensorInfo

FileRange = filesystem._StorageInfo
_FORMAT_VERSION = "1.0.0"
"""As torch writes it (CURRENT_DCP_VERSION of torch/distributed/checkpoint/filesystem.py)."""


class TensorChunk(NamedTuple):
    """A box of a tensor, stored as a file of ``torch.save`` within a file, maybe without leading axes of 1."""

    key: str
    box: Box
    place: FileRange


@dataclass(frozen=True, kw_only=True)
class DCPIndex:
    """The tensors of a directory by key, and their chunks."""

    tensors: Mapping[str, TensorInfo]
    chunks: Sequence[TensorChunk]

    @classmethod
    def read(cls, directory: Path) -> DCPIndex:
        """Reads ``.metadata``; raises CheckpointError with every file that is missing, damaged or too short."""
        content = read_metadata(directory)
        try:
            index = _parse(content)
            sizes = _sizes(content)
        except Exception as error:  # a damaged pickle has anything
            problem = f"{METADATA} is corrupted: {error!r}"
            raise CheckpointError(f"{directory} cannot be read", [problem]) from None
        problems = _problems(directory, sizes, index)
        if problems:
            raise CheckpointError(f"{directory} is broken", problems)
        return index

    def write(self, path: Path, objects: Mapping[str, FileRange]) -> None:
        """Writes the file that torch and Megatron read; ``objects`` are no tensors."""
        entries: dict[str, Any] = {}
        places: dict[MetadataIndex, FileRange] = {}
        for key, info in self.tensors.items():
            properties = metadata.TensorProperties(dtype=getattr(torch, info.dtype))
            size = torch.Size(info.shape)
            entries[key] = TensorStorageMetadata(properties=properties, size=size, chunks=[])
        for chunk in self.chunks:
            start = torch.Size(chunk.box.start)
            chunks = entries[chunk.key].chunks
            places[MetadataIndex(chunk.key, start, len(chunks))] = chunk.place
            chunks.append(metadata.ChunkStorageMetadata(start, torch.Size(chunk.box.shape)))
        for key, place in objects.items():
            entries[key] = metadata.BytesStorageMetadata()
            places[MetadataIndex(key)] = place
        content = Metadata(entries, {}, places, metadata.StorageMeta(), _FORMAT_VERSION)
        with write_errors(path):
            path.write_bytes(pickle.dumps(content))


def _parse(content: Metadata) -> DCPIndex:
    tensors: dict[str, TensorInfo] = {}
    chunks: list[TensorChunk] = []
    for key, entry in content.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            tensors[key] = TensorInfo(tuple(entry.size), dtype)
            for part in entry.chunks:
                place = content.storage_data[MetadataIndex(key, part.offsets)]
                box = Box(tuple(part.offsets), tuple(map(add, part.offsets, part.sizes)))
                chunks.append(TensorChunk(key, box, place))
    return DCPIndex(tensors=tensors, chunks=chunks)


def _sizes(content: Metadata) -> Counter[str]:
    """Returns how many bytes each file must have."""
    sizes: Counter[str] = Counter()
    for place in content.storage_data.values():
        sizes[place.relative_path] = max(sizes[place.relative_path], place.offset + place.length)
    return sizes


def _problems(directory: Path, sizes: Mapping[str, int], index: DCPIndex) -> list[str]:
    """Returns the problems of the files, and boxes outside of their tensors."""
    problems: list[str] = []
    for name, nbytes in sorted(sizes.items()):
        path = directory / name
        if Path(name).name != name:
            problems.append(f"{name} is not a file of this directory")
        elif not path.is_file():
            problems.append(f"{name} is missing")
        elif path.stat().st_size < nbytes:
            problems.append(f"{name} is truncated: it has {path.stat().st_size} of {nbytes} bytes")
    for chunk in index.chunks:
        info = index.tensors[chunk.key]
        if not Box.whole(info.shape).contains(chunk.box):
            problems.append(f"{METADATA} puts {chunk.key}{chunk.box} outside of {info}")
    return problems
