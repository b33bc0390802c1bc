"""Writes an HF directory from shards: every rank writes byte ranges into preallocated files.

The ranks share a coherent file system, and send nothing.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megarl.files import sync, write_errors
from megarl.weights.hf_files import DTYPES, FILES_RANK, INDEX_FILE, SINGLE_FILE, HFDirectory
from megarl.weights.plan import Boxed, Copy, SenderPlan, TransferPlan
from megarl.weights.planner import Holder, plan
from megarl.weights.shard_map import ITEM_BYTES, ShardMap, TensorInfo

CONFIG_FILE = "config.json"
MAX_FILE_BYTES = 5 * 10**9
PROCESSOR_FILES = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
"""Files of a checkpoint's directory of what is not text; a directory with a tokenizer alone has none."""
SIDE_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    *PROCESSOR_FILES,
)
"""Files of a checkpoint's directory besides config and weights; copied unchanged."""

_HEADER_ALIGNMENT = 8
_COPIED = 1 << 24
"""Elements of an untrained tensor that are copied at a time."""


@dataclass(frozen=True, kw_only=True)
class SafetensorsFile:
    """The layout of a safetensors file; ``offsets`` are each tensor's first byte in the file."""

    name: str
    tensors: Mapping[str, TensorInfo]
    header: bytes
    offsets: Mapping[str, int]
    nbytes: int


def export_plan(maps: Sequence[ShardMap], tensors: Mapping[str, TensorInfo]) -> TransferPlan:
    """Plans which of all ranks writes which regions of the canonical tensors; replicas share the writing."""
    sources = [Holder(rank=rank, map=shard_map) for rank, shard_map in enumerate(maps)]
    files = Holder(rank=FILES_RANK, map=ShardMap.identity(tensors))
    return plan(sources, [files], bucket_bytes=1 << 28)


def export_weights(
    directory: Path,
    tensors: Mapping[str, TensorInfo],
    part: SenderPlan | None,
    params: Mapping[str, Boxed],
    *,
    config: Mapping[str, Any],
    template: str | Path | None,
    untrained: tuple[str | Path, Sequence[str]] | None = None,
    lead: bool,
    barrier: Callable[[], None],
    max_file_bytes: int = MAX_FILE_BYTES,
    names: tuple[str, str] = (SINGLE_FILE, CONFIG_FILE),
) -> None:
    """Writes this rank's regions of an HF directory; returns on all ranks when it is complete.

    Waits at the barrier three times: before the first write, after the last write, and after the
    rename. The rename follows the second barrier, so either all ranks or none find the directory
    before the first.

    Args:
        directory: directory that appears when it is complete.
        tensors: canonical tensors with the dtypes to write.
        part: part of ``export_plan``; None where the rank writes nothing.
        template: directory whose tokenizer and generation files are copied.
        untrained: directory of a model, and patterns of those of its tensors that are copied as well,
            with the files of its processors.
        lead: True on exactly one rank, which creates the files and renames the directory.
        max_file_bytes: size that no file of several tensors exceeds.
        names: those of the file of weights, where one is enough, and of the file of ``config``.

    Raises:
        FileExistsError: the directory exists; on every rank, and nothing is written.
    """
    if directory.exists():
        raise FileExistsError(f"{directory} exists; an export does not overwrite")
    partial = directory.with_name(f".{directory.name}.partial")
    source: HFDirectory | None = None
    others: dict[str, TensorInfo] = {}
    if untrained is not None and untrained[1]:
        source = HFDirectory(untrained[0])
        others = source.matching(untrained[1])
    files = lay_out({**tensors, **others}, max_file_bytes, names[0])
    if lead:
        create_files(partial, files)
    barrier()
    if lead and source is not None:
        _copy_untrained(partial, files, source, others)
    if part:
        _write(partial, files, part.copies, params)
    barrier()
    if lead:
        write_index(partial, files)
        write_json(partial / names[1], config)
        if template is not None:
            copy_side_files(Path(template), partial)
        if source is not None:
            copy_side_files(source.path, partial, PROCESSOR_FILES)
        for path in (*partial.iterdir(), partial):
            sync(path)
        partial.rename(directory)
        sync(directory.parent)
    barrier()


def _copy_untrained(
    directory: Path, files: Sequence[SafetensorsFile], source: HFDirectory, names: Iterable[str]
) -> None:
    """Writes tensors of another directory into the files, part by part."""
    import torch

    file_of = _files_by_tensor(files)
    for name in names:
        file = file_of[name]
        info = file.tensors[name]
        path = directory / file.name
        data = np.memmap(path, dtype=np.uint8, mode="r+", offset=file.offsets[name], shape=(info.nbytes,))
        written = 0
        for values in source.parts(name, _COPIED):
            block = values.contiguous().reshape(-1).view(torch.uint8).numpy()
            data[written : written + len(block)] = block
            written += len(block)
        data.flush()


def _files_by_tensor(files: Sequence[SafetensorsFile]) -> dict[str, SafetensorsFile]:
    found: dict[str, SafetensorsFile] = {}
    for file in files:
        found.update(dict.fromkeys(file.tensors, file))
    return found


def create_files(directory: Path, files: Sequence[SafetensorsFile]) -> None:
    """Creates files with headers and reserved space in a new directory; on OSError nothing is left.

    Without reserved space, a write to a memory map on a full disk ends the process (SIGBUS).
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    try:
        for file in files:
            path = directory / file.name
            with write_errors(path, file.nbytes), open(path, "w+b") as stream:
                stream.write(file.header)
                stream.flush()
                os.posix_fallocate(stream.fileno(), 0, file.nbytes)
    except OSError:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _write(
    directory: Path, files: Sequence[SafetensorsFile], copies: Sequence[Copy], params: Mapping[str, Boxed]
) -> None:
    """Writes boxes of local parameters into the files."""
    file_of = _files_by_tensor(files)
    open_files: dict[str, np.memmap[Any, np.dtype[np.uint8]]] = {}
    for copy in copies:
        file = file_of[copy.target]
        if file.name not in open_files:
            open_files[file.name] = np.memmap(directory / file.name, dtype=np.uint8, mode="r+")
        info = file.tensors[copy.target]
        start = file.offsets[copy.target]
        item = ITEM_BYTES[info.dtype]
        data: npt.NDArray[np.uint8] = open_files[file.name][start : start + info.nbytes]
        target = data.reshape(*info.shape[:-1], info.shape[-1] * item)
        *rows, last = copy.target_box.slices
        target[*rows, slice(last.start * item, last.stop * item)] = _bytes(copy, params)
    for data in open_files.values():
        data.flush()


def lay_out(
    tensors: Mapping[str, TensorInfo], max_file_bytes: int = MAX_FILE_BYTES, single: str = SINGLE_FILE
) -> list[SafetensorsFile]:
    """Returns the files of a directory: tensors in order, in several files where one would be too large."""
    groups = group_tensors(tensors, max_file_bytes)
    if len(groups) == 1:
        return [_layout(single, groups[0])]
    files: list[SafetensorsFile] = []
    for number, group in enumerate(groups, start=1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        files.append(_layout(name, group))
    return files


def group_tensors(tensors: Mapping[str, TensorInfo], max_bytes: int) -> list[dict[str, TensorInfo]]:
    """Groups tensors in their order; a group is closed before it would exceed ``max_bytes``."""
    groups: list[dict[str, TensorInfo]] = [{}]
    filled = 0
    for name, info in tensors.items():
        if groups[-1] and filled + info.nbytes > max_bytes:
            groups.append({})
            filled = 0
        groups[-1][name] = info
        filled += info.nbytes
    return groups


def write_index(directory: Path, files: Sequence[SafetensorsFile]) -> None:
    """Writes the index where there are several files."""
    if len(files) > 1:
        total = 0
        weight_map: dict[str, str] = {}
        for file in files:
            for name, info in file.tensors.items():
                total += info.nbytes
                weight_map[name] = file.name
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(directory / INDEX_FILE, index)


def copy_side_files(source: Path, target: Path, names: Sequence[str] = SIDE_FILES) -> None:
    """Copies the files that exist."""
    for name in names:
        if (source / name).is_file():
            with write_errors(target / name):
                shutil.copyfile(source / name, target / name)


def _layout(name: str, tensors: Mapping[str, TensorInfo]) -> SafetensorsFile:
    """Lays out a safetensors file: header length (8 bytes, little endian), JSON header, data."""
    codes = {dtype: code for code, dtype in DTYPES.items()}
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    end = 0
    # Wider dtypes first, so that every tensor is aligned to its items.
    for tensor, info in sorted(tensors.items(), key=lambda item: -ITEM_BYTES[item[1].dtype]):
        offsets[tensor] = end
        end += info.nbytes
        span = [offsets[tensor], end]
        entries[tensor] = {"dtype": codes[info.dtype], "shape": list(info.shape), "data_offsets": span}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    for tensor in offsets:
        offsets[tensor] += len(header)
    nbytes = len(header) + end
    return SafetensorsFile(name=name, tensors=tensors, header=header, offsets=offsets, nbytes=nbytes)


def _bytes(copy: Copy, params: Mapping[str, Boxed]) -> npt.NDArray[np.uint8]:
    """Returns a copy's elements as bytes in the target's order and dtype; the last axis counts bytes."""
    import torch

    values = copy.arranged(params[copy.source][copy.source_box.slices])
    # contiguous() keeps odd strides of axes with one element, which a view as bytes refuses.
    fresh = torch.empty(values.shape, dtype=getattr(torch, copy.dtype)).copy_(values)
    return fresh.view(torch.uint8).numpy()


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes JSON indented and in order, as Hugging Face's libraries do."""
    with write_errors(path):
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
