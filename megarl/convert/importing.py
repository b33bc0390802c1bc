"""From a Hugging Face directory to a checkpoint as Megatron-LM writes it, which any layout loads."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

from megarl.convert.blocks import group_blocks, plan_blocks, sources_of, stored_map
from megarl.convert.dcp import METADATA, DCPIndex, FileRange, TensorChunk
from megarl.convert.find_checkpoint import HF_FILES, RELEASE, TRACKER
from megarl.convert.hf_source import open_hf, read_spec
from megarl.convert.resources import Resources
from megarl.convert.write_task import Staging, WriteRecord, WriteTask, task_bytes
from megarl.errors import UsageError
from megarl.files import write_durably, write_errors
from megarl.models import ModelSpec
from megarl.weights.export import copy_side_files
from megarl.weights.shard_map import ITEM_BYTES, Box, ShardMap, TensorInfo

_COMMON = {"checkpoint_version": 3.0, "iteration": 0, "content_metadata": {"singleton_local_shards": False}}
"""The part of ``common.pt`` that Megatron-LM reads (megatron/training/checkpointing.py): the order of the rows of
queries, keys and values (3.0: by group), and how its modules make keys."""
_BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_DECODER = "decoder."
_SUFFIXES = (".layer_norm_weight", ".layer_norm_bias", ".weight", ".bias")
_OBJECTS_FILE = "__objects_0.distcp"


def import_checkpoint(
    hf: Path,
    out: Path,
    *,
    resources: Resources,
    dtype: str | None = None,
    allow_pickle: bool = False,
    max_task_bytes: int | None = None,
) -> None:
    """Writes a Megatron checkpoint with the weights of a Hugging Face directory; continues an interrupted import.

    Args:
        out: Megatron-LM's save directory; it appears when it is complete.
        dtype: of all weights; that of the files by default.
        allow_pickle: read ``pytorch_model.bin`` where there is no safetensors file.
        max_task_bytes: bytes that are written and recorded together; chosen by the size by default.
    """
    spec = read_spec(hf)
    with Staging(out) as staging:
        stored = open_hf(hf, spec.manifest(spec.head), allow_pickle=allow_pickle)
        tensors = {name: tensor.info for name, tensor in stored.items()}
        whole = _with_dtypes(_global_map(spec), tensors, dtype)
        block_bytes = resources.block_bytes(len(tensors), whole.nbytes)
        boxes = {f"{key}{box}": (key, box) for key, box in _stored_boxes(whole, block_bytes)}
        target = stored_map(whole, boxes)
        blocks = plan_blocks(ShardMap.identity(tensors), target, block_bytes)
        tasks: list[WriteTask] = []
        for number, group in enumerate(group_blocks(blocks, max_task_bytes or task_bytes(target.nbytes))):
            file = f"{RELEASE}/__{number}_0.distcp"
            sources = sources_of(group, stored)
            tasks.append(WriteTask(file=file, start=0, archived=True, blocks=group, sources=sources))
        records = staging.write(
            f"import {hf.name}",
            tasks,
            inputs={tensor.path for tensor in stored.values()},
            prepare=lambda output: (output / RELEASE).mkdir(),
            resources=resources,
            scratch_bytes=block_bytes,
        )
        _write_indices(staging.output / RELEASE, whole, boxes, tasks, records)
        write_durably(staging.output / TRACKER, RELEASE)
        (staging.output / HF_FILES).mkdir(exist_ok=True)
        copy_side_files(hf, staging.output / HF_FILES)
        write_durably(staging.output / HF_FILES / "config.json", (hf / "config.json").read_text(encoding="utf-8"))
        staging.publish()


def _global_map(spec: ModelSpec) -> ShardMap:
    """Returns the map of Megatron's keys, of its modules with and without Transformer Engine."""
    with_te, without = (spec.checkpoint_map(spec.head, transformer_engine=te) for te in (True, False))
    extra = (shard for shard in without.shards if shard.param not in with_te.params)
    params = {**with_te.params, **without.params}
    return ShardMap(params=params, shards=(*with_te.shards, *extra), padding=with_te.padding)


def _with_dtypes(whole: ShardMap, tensors: Mapping[str, TensorInfo], dtype: str | None) -> ShardMap:
    """Returns the map with the dtype of each parameter: ``dtype``, or that of the canonical tensors in it."""
    dtypes: dict[str, set[str]] = {}
    for shard in whole.shards:
        dtypes.setdefault(shard.param, set()).add(dtype or tensors[shard.name].dtype)
    mixed = [f"{key}: {' and '.join(sorted(found))}" for key, found in dtypes.items() if len(found) > 1]
    if mixed:
        problem = "tensors that Megatron stores together have different dtypes; choose one with --dtype:"
        raise UsageError("\n  ".join([problem, *mixed]))
    return replace(whole, params={key: replace(info, dtype=min(dtypes[key])) for key, info in whole.params.items()})


def _stored_boxes(whole: ShardMap, block_bytes: int) -> Iterator[tuple[str, Box]]:
    """Yields each layer's, and each expert's, part of every tensor; splits larger ones by rows."""
    leading = {shard.param: shard.leading for shard in whole.shards}
    for key, info in whole.params.items():
        stacked = info.shape[: leading[key]]
        inner = info.shape[leading[key] :]
        for at in product(*map(range, stacked)):
            box = Box((*at, *(0 for _ in inner)), (*(index + 1 for index in at), *inner))
            yield from ((key, part) for part in box.split(block_bytes // ITEM_BYTES[info.dtype]))


def _write_indices(
    directory: Path,
    whole: ShardMap,
    boxes: Mapping[str, tuple[str, Box]],
    tasks: Sequence[WriteTask],
    records: Mapping[str, WriteRecord],
) -> None:
    """Writes ``.metadata`` and the other files that Megatron expects beside the weights."""
    chunks: list[TensorChunk] = []
    for task in tasks:
        ends = records[task.name].ends
        for block, begin, end in zip(task.blocks, ends, ends[1:], strict=False):
            key, box = boxes[block.target]
            chunks.append(TensorChunk(key=key, box=box, place=FileRange(Path(task.file).name, begin, end - begin)))
    empty = io.BytesIO()
    torch.save([None], empty)
    objects = dict.fromkeys(_extra_states(whole), FileRange(_OBJECTS_FILE, 0, len(empty.getvalue())))
    with write_errors(directory / _OBJECTS_FILE):
        (directory / _OBJECTS_FILE).write_bytes(empty.getvalue())
    with write_errors(directory / "common.pt"):
        torch.save(_COMMON, directory / "common.pt")
    write_durably(directory / "metadata.json", json.dumps(_BACKENDS))
    DCPIndex(tensors=whole.params, chunks=chunks, objects=objects).write(directory / METADATA)


def _extra_states(whole: ShardMap) -> Iterator[str]:
    """Yields the keys of the extra state of Megatron's modules, which is empty without quantisation.

    Modules need it when they load: those of Transformer Engine all, others the linear layers. The key of a part names
    its indices along the leading axes (ShardedObject.unique_key, megatron-core 0.19.2).
    """
    leading = {shard.param: shard.leading for shard in whole.shards}
    modules: dict[str, tuple[int, ...]] = {}
    for key, info in whole.params.items():
        suffix = next(suffix for suffix in _SUFFIXES if key.endswith(suffix))
        if key.startswith(_DECODER):
            modules[key.removesuffix(suffix)] = info.shape[: leading[key]]
    attention = next(name for name in modules if name.endswith("self_attention.linear_proj"))
    modules[attention.replace("linear_proj", "core_attention")] = modules[attention]
    for module, shape in modules.items():
        for at in product(*map(range, shape or (1,))):
            yield f"{module}._extra_state/shard_{'.'.join(map(str, at))}_{'.'.join(map(str, shape or (1,)))}"
