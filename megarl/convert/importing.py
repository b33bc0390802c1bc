"""From a Hugging Face directory to a checkpoint as Megatron-LM writes it, which any layout loads."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from megarl.convert.chunks import Block, Slab, blocks, chunk_map
from megarl.convert.dcp import METADATA, Chunk, Index, Place
from megarl.convert.errors import UsageError
from megarl.convert.hf import open_hf, read_spec
from megarl.convert.locating import RELEASE, TRACKER
from megarl.convert.memory import Resources
from megarl.convert.models import keep_sides
from megarl.convert.parts import Part, Record, grouped, part_bytes
from megarl.convert.staging import Staging
from megarl.convert.writing import write_parts
from megarl.models import ModelSpec
from megarl.weights.shard_map import ITEM_BYTES, Box, ShardMap, TensorInfo

_COMMON = {"checkpoint_version": 3.0, "iteration": 0, "content_metadata": {"singleton_local_shards": False}}
"""What Megatron-LM reads of ``common.pt`` (megatron/training/checkpointing.py): the order of the rows of queries, keys
and values (3.0: by group), and how its modules make keys."""
_BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_DECODER = "decoder."
_KINDS = (".layer_norm_weight", ".layer_norm_bias", ".weight", ".bias")
_OBJECTS_FILE = "__objects_0.distcp"


def import_checkpoint(
    hf: Path,
    out: Path,
    *,
    resources: Resources,
    dtype: str | None = None,
    allow_pickle: bool = False,
    part_size: int | None = None,
) -> None:
    """Writes a Megatron checkpoint with the weights of a Hugging Face directory.

    Args:
        hf: the directory.
        out: Megatron-LM's save directory to be; it appears when everything is in it. Continued if it was interrupted.
        resources: what may be used.
        dtype: of all weights; that of the files by default.
        allow_pickle: read ``pytorch_model.bin`` where there is no safetensors file.
        part_size: bytes that are written, recorded and continued from together; chosen by the size by default.

    Raises:
        UsageError: it cannot be done as asked.
        BrokenError, CheckpointError: files are damaged, or their tensors are not the model's.
    """
    spec = read_spec(hf)
    with Staging(out) as staging:
        source = open_hf(hf, allow_pickle=allow_pickle).fitted(spec.manifest(spec.head))
        whole = _stored_as(_global_map(spec), source.tensors, dtype)
        block_bytes = resources.block_bytes(len(source.tensors), whole.nbytes)
        slabs = {f"{slab.param}{slab.box}": slab for slab in _slabs(whole, block_bytes)}
        target = chunk_map(whole, slabs)
        groups = grouped(
            blocks(ShardMap.identity(source.tensors), target, block_bytes), part_size or part_bytes(target.nbytes)
        )
        parts = [
            Part(
                file=f"{RELEASE}/__{number}_0.distcp",
                start=0,
                archived=True,
                blocks=group,
                sources={name: source.stored[name] for block in group for name in block.sources},
            )
            for number, group in enumerate(groups)
        ]
        records = write_parts(
            f"import {hf.name}",
            staging,
            parts,
            inputs=source.files,
            prepare=lambda output: (output / RELEASE).mkdir(),
            processes=resources.processes,
            scratch_bytes=block_bytes,
        )
        _finish(staging.output, whole, slabs, parts, records)
        keep_sides(hf, staging.output)
        staging.publish()


def _global_map(spec: ModelSpec) -> ShardMap:
    """Megatron's keys, of its modules with and without Transformer Engine: the checkpoint is for both."""
    own, local = (spec.checkpoint_map(spec.head, transformer_engine=te) for te in (True, False))
    extra = {key: info for key, info in local.params.items() if key not in own.params}
    return ShardMap(
        params={**own.params, **extra},
        pieces=(*own.pieces, *(piece for piece in local.pieces if piece.param in extra)),
        holes=own.holes,
    )


def _stored_as(whole: ShardMap, tensors: Mapping[str, TensorInfo], dtype: str | None) -> ShardMap:
    """The map with the dtypes that its parameters get: those of the canonical tensors in them."""
    dtypes: dict[str, set[str]] = {}
    for piece in whole.pieces:
        dtypes.setdefault(piece.param, set()).add(dtype or tensors[piece.name].dtype)
    mixed = [f"{key}: {' and '.join(sorted(found))}" for key, found in dtypes.items() if len(found) > 1]
    if mixed:
        raise UsageError(
            "tensors that Megatron stores together have different dtypes; choose one with --dtype:\n  "
            + "\n  ".join(mixed)
        )
    return replace(whole, params={key: replace(info, dtype=min(dtypes[key])) for key, info in whole.params.items()})


def _slabs(whole: ShardMap, block_bytes: int) -> Iterator[Slab]:
    """Each layer's, and each expert's, part of every tensor; larger ones cut by rows."""
    stacked = {piece.param: len(piece.box.start) - len(piece.region.start) for piece in whole.pieces}
    for key, info in whole.params.items():
        boxes = [Box.whole(info.shape)]
        for axis in range(stacked[key]):
            boxes = [part for box in boxes for part in _along(box, axis)]
        for box in boxes:
            for part in box.split(block_bytes // ITEM_BYTES[info.dtype]):
                yield Slab(param=key, box=part, dtype=info.dtype)


def _along(box: Box, axis: int) -> Iterator[Box]:
    """A box for every index of an axis."""
    for at in range(box.start[axis], box.stop[axis]):
        yield Box((*box.start[:axis], at, *box.start[axis + 1 :]), (*box.stop[:axis], at + 1, *box.stop[axis + 1 :]))


def _finish(
    output: Path, whole: ShardMap, slabs: Mapping[str, Slab], parts: Sequence[Part], records: Mapping[str, Record]
) -> None:
    """Writes what says where everything is."""
    directory = output / RELEASE
    chunks = [
        _chunk(slabs[block.target], part, begin, end)
        for part in parts
        for block, begin, end in _placed(part, records[part.name])
    ]
    empty = io.BytesIO()
    torch.save([None], empty)
    (directory / _OBJECTS_FILE).write_bytes(empty.getvalue())
    place = Place(file=_OBJECTS_FILE, offset=0, nbytes=len(empty.getvalue()))
    objects = dict.fromkeys(_extra_states(whole), place)
    Index(tensors=whole.params, chunks=chunks, objects=objects).write(directory / METADATA)
    torch.save(_COMMON, directory / "common.pt")
    (directory / "metadata.json").write_text(json.dumps(_BACKENDS))
    (output / TRACKER).write_text(RELEASE)


def _placed(part: Part, record: Record) -> Iterator[tuple[Block, int, int]]:
    """The blocks of a part and where they are in its file."""
    return zip(part.blocks, record.ends, record.ends[1:], strict=False)


def _chunk(slab: Slab, part: Part, begin: int, end: int) -> Chunk:
    place = Place(file=Path(part.file).name, offset=begin, nbytes=end - begin)
    return Chunk(key=slab.param, box=slab.box, place=place)


def _extra_states(whole: ShardMap) -> Iterator[str]:
    """The keys of what Megatron's modules store besides tensors, which is nothing without quantisation.

    Modules ask for it when they load: those of Transformer Engine all, others the linear layers. The key of a part
    names its indices along the leading axes (ShardedObject.unique_key, megatron-core 0.16.1).
    """
    stacked = {piece.param: len(piece.box.start) - len(piece.region.start) for piece in whole.pieces}
    modules: dict[str, tuple[int, ...]] = {}
    for key, info in whole.params.items():
        kind = next(kind for kind in _KINDS if key.endswith(kind))
        if key.startswith(_DECODER):
            modules[key.removesuffix(kind)] = info.shape[: stacked[key]]
    attention = next(name for name in modules if name.endswith("self_attention.linear_proj"))
    modules[attention.replace("linear_proj", "core_attention")] = modules[attention]
    for module, shape in modules.items():
        for box in [Box.whole(shape)] if not shape else Box.whole(shape).split(1):
            at, of = (box.start, shape) if shape else ((0,), (1,))
            yield f"{module}._extra_state/shard_{'.'.join(map(str, at))}_{'.'.join(map(str, of))}"
