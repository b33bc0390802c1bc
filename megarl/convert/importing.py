"""From a Hugging Face directory to a checkpoint as Megatron-LM writes it, which any layout loads."""

from __future__ import annotations

import io
import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import torch

from megarl.convert.dcp import METADATA, DCPIndex, FileRange, TensorChunk
from megarl.convert.megatron_checkpoint import HF_FILES, RELEASE, TRACKER, require_megatron_format
from megarl.convert.output import OutputFile, PartialOutput
from megarl.convert.resources import DEFAULT, Resources
from megarl.convert.stored import (
    ArchivedTensor,
    SafeTensor,
    Shifted,
    Sources,
    Stored,
    open_hf,
    open_untrained,
    read_spec,
    shards_within,
)
from megarl.errors import UsageError
from megarl.files import write_durably, write_errors
from megarl.models import ModelSpec
from megarl.weights.export import SafetensorsFile, copy_side_files, group_tensors, lay_out, write_index
from megarl.weights.plan import Copy
from megarl.weights.shard_map import ITEM_BYTES, Box, ShardMap, TensorInfo

MAX_FILE_BYTES = 1 << 30
_CHUNK_BYTES = 64 << 20
"""Largest part of a tensor with a separate index entry."""
_COMMON = {"checkpoint_version": 3.0, "iteration": 0, "content_metadata": {"singleton_local_shards": False}}
"""The part of ``common.pt`` that Megatron-LM reads (megatron/training/checkpointing.py): the order
of the rows of queries, keys and values (3.0: by group), and how its modules make keys."""
_BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_DECODER = "decoder."
_SUFFIX = re.compile(r"\.(layer_norm_)?(weight|bias)$")
_OBJECTS_FILE = "__objects_0.distcp"


def import_checkpoint(
    hf: Path,
    out: Path,
    *,
    resources: Resources = DEFAULT,
    dtype: str | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes a Megatron checkpoint with the weights of a Hugging Face directory; continues an interrupted import.

    Args:
        max_file_bytes: size of the tensors in a file; a larger tensor has a separate file.
    """
    spec = read_spec(hf)
    require_megatron_format(spec)
    with PartialOutput(out) as output:
        stored = open_hf(hf, spec.manifest(spec.head))
        whole = _with_dtypes(_global_map(spec), stored, dtype, spec)
        stored = _centred(whole, stored, spec)
        boxes = _stored_boxes(whole)
        chunks: dict[str, TensorInfo] = {}
        for name, (key, box) in boxes.items():
            chunks[name] = TensorInfo(box.shape, whole.params[key].dtype)
        copies: dict[str, list[Copy]] = defaultdict(list)
        for param, box, name, region, transposed in shards_within(whole, boxes):
            copies[param].append(Copy(name, region, param, box, chunks[param].dtype, transposed))
        sources = Sources(stored=stored, copies=copies)
        files: list[OutputFile] = []
        for number, group in enumerate(group_tensors(chunks, max_file_bytes)):
            path = f"{RELEASE}/__{number}_0.distcp"
            files.append(OutputFile(path=path, assembly=sources.assembly(group), header=None))
        inputs = sources.files
        layouts, others = _untrained_files(hf, spec, max_file_bytes)
        for file in others:
            inputs |= {tensor.path for tensor in file.assembly.sources.values()}
        written = output.write(f"import {hf.name}", files + others, inputs=inputs, resources=resources)
        _write_indices(output.directory / RELEASE, whole, _chunks(files, boxes, written))
        write_durably(output.directory / TRACKER, RELEASE)
        hf_files = output.directory / HF_FILES
        hf_files.mkdir(exist_ok=True)
        if layouts:
            write_index(hf_files, layouts)
        copy_side_files(hf, hf_files)
        config = (hf / "config.json").read_text(encoding="utf-8")
        write_durably(hf_files / "config.json", config)
        output.publish()


def _untrained_files(hf: Path, spec: ModelSpec, max_file_bytes: int) -> tuple[list[SafetensorsFile], list[OutputFile]]:
    """Returns the files of what passes through untouched, beside the model's config.json, for exports."""
    stored = open_untrained(hf, spec)
    if not stored:
        return [], []
    sources = Sources(stored={}, copies={}).with_whole(stored)
    layouts = lay_out({name: tensor.info for name, tensor in stored.items()}, max_file_bytes)
    files: list[OutputFile] = []
    for layout in layouts:
        ordered = {name: layout.tensors[name] for name in layout.offsets}
        path = f"{HF_FILES}/{layout.name}"
        files.append(OutputFile(path=path, assembly=sources.assembly(ordered), header=layout.header))
    return layouts, files


def _global_map(spec: ModelSpec) -> ShardMap:
    """Returns the map of Megatron's keys, of its modules with and without Transformer Engine."""
    with_te = spec.checkpoint_map(spec.head, transformer_engine=True)
    without = spec.checkpoint_map(spec.head, transformer_engine=False)
    others = tuple(shard for shard in without.shards if shard.param not in with_te.params)
    params = {**with_te.params, **without.params}
    return ShardMap(params=params, shards=with_te.shards + others, padding=with_te.padding)


def _centred(whole: ShardMap, stored: Mapping[str, Stored], spec: ModelSpec) -> dict[str, Stored]:
    """Returns what Megatron's norms after delta nets have, and the others as they are."""
    found = dict(stored)
    for shard in whole.shards:
        tensor = stored[shard.name]
        if spec.is_centred(shard.param) and isinstance(tensor, SafeTensor | ArchivedTensor):
            found[shard.name] = Shifted(tensor=tensor, by=-1.0)
    return found


def _with_dtypes(whole: ShardMap, stored: Mapping[str, Stored], dtype: str | None, spec: ModelSpec) -> ShardMap:
    """Returns the map with the dtype of each parameter: ``dtype``, or that of the tensors in it.

    Those that are 1 less keep more digits, so that an export has the same bits; Megatron casts what it loads.
    """
    fixed = spec.fixed_dtypes()
    dtypes: dict[str, set[str]] = defaultdict(set)
    for shard in whole.shards:
        wanted = dtype and fixed.get(shard.name, dtype)
        wanted = wanted or stored[shard.name].info.dtype
        if spec.is_centred(shard.param):
            wanted = "float32" if ITEM_BYTES[wanted] == 2 else "float64"
        dtypes[shard.param].add(wanted)
    for key, found in dtypes.items():
        if len(found) > 1:
            mixed = " and ".join(sorted(found))
            raise UsageError(f"Megatron stores tensors of {mixed} together in {key}; choose one with --dtype")
    params = {key: replace(info, dtype=min(dtypes[key])) for key, info in whole.params.items()}
    return replace(whole, params=params)


def _stored_boxes(whole: ShardMap) -> dict[str, tuple[str, Box]]:
    """Returns each layer's, and each expert's, part of every tensor, split by rows where it is large."""
    leading = {shard.param: shard.leading for shard in whole.shards}
    boxes: dict[str, tuple[str, Box]] = {}
    for key, info in whole.params.items():
        layer = math.prod(info.shape[leading[key] :])
        chunk = _CHUNK_BYTES // ITEM_BYTES[info.dtype]
        for part in Box.whole(info.shape).split(min(layer, chunk)):
            boxes[f"{key}{part}"] = (key, part)
    return boxes


def _chunks(
    files: Sequence[OutputFile], boxes: Mapping[str, tuple[str, Box]], written: Mapping[str, Sequence[int]]
) -> list[TensorChunk]:
    """Returns the place of each box of a tensor in the files."""
    chunks: list[TensorChunk] = []
    for file in files:
        ranges = pairwise(written[file.path])
        for name, (begin, end) in zip(file.assembly.tensors, ranges, strict=True):
            key, box = boxes[name]
            place = FileRange(Path(file.path).name, begin, end - begin)
            chunks.append(TensorChunk(key, box, place))
    return chunks


def _write_indices(directory: Path, whole: ShardMap, chunks: Sequence[TensorChunk]) -> None:
    """Writes ``.metadata`` and the other files that Megatron expects beside the weights."""
    stream = io.BytesIO()
    torch.save([None], stream)
    empty = stream.getvalue()
    objects = dict.fromkeys(_extra_states(whole), FileRange(_OBJECTS_FILE, 0, len(empty)))
    with write_errors(directory / _OBJECTS_FILE):
        (directory / _OBJECTS_FILE).write_bytes(empty)
    with write_errors(directory / "common.pt"):
        torch.save(_COMMON, directory / "common.pt")
    write_durably(directory / "metadata.json", json.dumps(_BACKENDS))
    DCPIndex(tensors=whole.params, chunks=chunks).write(directory / METADATA, objects)


def _extra_states(whole: ShardMap) -> list[str]:
    """Returns the keys of the extra state of Megatron's modules, which is empty without quantization.

    Modules need it when they load: those of Transformer Engine all, others the linear layers. The
    key of a part names its indices along the leading axes (ShardedObject.unique_key, megatron-core
    0.19.2).
    """
    leading = {shard.param: shard.leading for shard in whole.shards}
    modules: dict[str, tuple[int, ...]] = {}
    for key, info in whole.params.items():
        if key.startswith(_DECODER):
            modules[_SUFFIX.sub("", key)] = info.shape[: leading[key]] or (1,)
    attention = next(name for name in modules if name.endswith("self_attention.linear_proj"))
    modules[attention.replace("linear_proj", "core_attention")] = modules[attention]
    keys: list[str] = []
    for module, shape in modules.items():
        extents = ".".join(map(str, shape))
        for index in product(*map(range, shape)):
            place = ".".join(map(str, index))
            keys.append(f"{module}._extra_state/shard_{place}_{extents}")
    return keys
