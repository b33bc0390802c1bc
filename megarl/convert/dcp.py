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

from megarl.convert.stored import ArchivedTensor
from megarl.files import write_errors
from megarl.weights.dcp_metadata import METADATA, read_metadata
from megarl.weights.hf_files import CheckpointError
from megarl.weights.shard_map import Box, Shape, TensorInfo

_FORMAT_VERSION = "1.0.0"
"""As torch writes it (CURRENT_DCP_VERSION of torch/distributed/checkpoint/filesystem.py)."""


class FileRange(NamedTuple):
    """A range of bytes in a file of the directory."""

    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorChunk:
    """A box of a tensor, stored as a file of ``torch.save`` within a file, maybe without leading axes of 1."""

    key: str
    box: Box
    place: FileRange


@dataclass(frozen=True, kw_only=True)
class DCPIndex:
    """The contents of a directory: tensors by key, the chunks of all tensors, and other objects by key."""

    tensors: Mapping[str, TensorInfo]
    chunks: Sequence[TensorChunk]
    objects: Mapping[str, FileRange]

    @classmethod
    def read(cls, directory: Path) -> DCPIndex:
        """Reads ``.metadata``; raises CheckpointError with every file that is missing, damaged or too short."""
        content = read_metadata(directory)
        try:
            index = _parse(content)
        except Exception as error:  # a damaged pickle has anything
            problem = f"{METADATA} is corrupted: {error!r}"
            raise CheckpointError(f"{directory} cannot be read", [problem]) from None
        problems = _problems(directory, index)
        if problems:
            raise CheckpointError(f"{directory} is broken", problems)
        return index

    def write(self, path: Path) -> None:
        """Writes the file that torch and Megatron read."""
        entries: dict[str, Any] = {}
        places: dict[MetadataIndex, Any] = {}
        for key, info in self.tensors.items():
            properties = metadata.TensorProperties(dtype=getattr(torch, info.dtype))
            size = torch.Size(info.shape)
            entries[key] = TensorStorageMetadata(properties=properties, size=size, chunks=[])
        for chunk in self.chunks:
            start = torch.Size(chunk.box.start)
            chunks = entries[chunk.key].chunks
            index = MetadataIndex(chunk.key, start, len(chunks))
            places[index] = filesystem._StorageInfo(*chunk.place)
            chunks.append(metadata.ChunkStorageMetadata(start, torch.Size(chunk.box.shape)))
        for key, place in self.objects.items():
            entries[key] = metadata.BytesStorageMetadata()
            places[MetadataIndex(key)] = filesystem._StorageInfo(*place)
        content = Metadata(entries, planner_data={}, storage_data=places)
        content.storage_meta = metadata.StorageMeta()
        content.version = _FORMAT_VERSION
        with write_errors(path):
            path.write_bytes(pickle.dumps(content))

    def stored(self, directory: Path, chunk: TensorChunk) -> ArchivedTensor:
        file, offset, nbytes = chunk.place
        info = TensorInfo(chunk.box.shape, self.tensors[chunk.key].dtype)
        return ArchivedTensor(path=directory / file, offset=offset, nbytes=nbytes, info=info)


def _parse(content: Metadata) -> DCPIndex:
    places: dict[tuple[str, Shape | None], FileRange] = {}
    for at, info in content.storage_data.items():
        offset = None if at.offset is None else tuple(at.offset)
        places[at.fqn, offset] = FileRange(info.relative_path, info.offset, info.length)
    tensors: dict[str, TensorInfo] = {}
    chunks: list[TensorChunk] = []
    objects: dict[str, FileRange] = {}
    for key, entry in content.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            objects[key] = places[key, None]
            continue
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        tensors[key] = TensorInfo(tuple(entry.size), dtype)
        for part in entry.chunks:
            start = tuple(part.offsets)
            box = Box(start, tuple(map(add, start, part.sizes)))
            chunks.append(TensorChunk(key=key, box=box, place=places[key, start]))
    return DCPIndex(tensors=tensors, chunks=chunks, objects=objects)


def _problems(directory: Path, index: DCPIndex) -> list[str]:
    """Returns the problems of the files, and boxes outside of their tensors."""
    problems: list[str] = []
    needed: Counter[str] = Counter()
    for place in (*[chunk.place for chunk in index.chunks], *index.objects.values()):
        needed[place.file] = max(needed[place.file], place.offset + place.nbytes)
    for name, nbytes in sorted(needed.items()):
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
