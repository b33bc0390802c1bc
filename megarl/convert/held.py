"""A checkpoint's sharded tensors as a source: where each chunk of a model's weights lies."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from megarl.convert.chunks import Slab, chunk_map
from megarl.convert.dcp import Chunk, Index, read_index, stored
from megarl.convert.errors import BrokenError
from megarl.convert.locating import Checkpoint
from megarl.convert.stored import Stored
from megarl.models import ModelSpec
from megarl.types import HeadName
from megarl.weights.hf_files import misfits
from megarl.weights.shard_map import Box, Manifest, ShardMap, TensorInfo

WEIGHT = "weight."
"""What the keys of a role's weights begin with, in a run's checkpoint."""
_TRAINING = (
    "optimizer.*",
    "chained_*",
    "opt_param_scheduler*",
    "rng_state*",
    "rerun_state*",
    "exp_avg*",
    "master.*",
    "average.*",
)
"""Keys of what a checkpoint has besides weights."""

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(.+\.mlp\.experts\.experts)\.(\d+)\.(.+)")
_HALF = re.compile(r"(.+\.linear_fc1\.(?:weight|bias))_([wv])")


@dataclass(frozen=True, kw_only=True)
class Held:
    """The weights of a checkpoint.

    Args:
        map: of the chunks, each a parameter.
        stored: where they lie, by the same names.
        tensors: the model's canonical tensors, with the dtypes that they are stored in.
    """

    map: ShardMap
    stored: Mapping[str, Stored]
    tensors: Mapping[str, TensorInfo]


def open_held(checkpoint: Checkpoint, spec: ModelSpec, head: HeadName) -> Held:
    """Finds the weights of a model in a checkpoint.

    Raises:
        BrokenError: files are missing or damaged, or its tensors are not the model's; all of them are listed.
    """
    index = read_index(checkpoint.directory)
    index = index if checkpoint.kind == "megarl" else _stacked(index)
    maps = [_role_map(spec, head)] if checkpoint.kind == "megarl" else _megatron_maps(index, spec, head)
    whole = min(maps, key=lambda known: sum(key not in index.tensors for key in known.params))
    ignored = (*_TRAINING, *(key for known in maps for key in known.params))
    problems = misfits(index.tensors, Manifest(tensors=whole.params, ignored=ignored))
    if problems:
        raise BrokenError(f"{checkpoint.directory} does not fit the {spec.family.model_type} model", problems)
    chunks = {f"{chunk.key}{chunk.box}": chunk for chunk in index.chunks if chunk.key in whole.params}
    slabs = {
        name: Slab(param=chunk.key, box=chunk.box, dtype=index.tensors[chunk.key].dtype)
        for name, chunk in chunks.items()
    }
    dtypes = {piece.name: index.tensors[piece.param].dtype for piece in whole.pieces}
    return Held(
        map=chunk_map(whole, slabs),
        stored={name: stored(checkpoint.directory, index, chunk) for name, chunk in chunks.items()},
        tensors={name: replace(info, dtype=dtypes[name]) for name, info in spec.canonical(head).items()},
    )


def _role_map(spec: ModelSpec, head: HeadName) -> ShardMap:
    """A run's checkpoint has whole canonical tensors."""
    named = ShardMap.identity(spec.canonical(head))
    return ShardMap(
        params={WEIGHT + name: info for name, info in named.params.items()},
        pieces=tuple(piece._replace(param=WEIGHT + piece.param) for piece in named.pieces),
    )


def _megatron_maps(index: Index, spec: ModelSpec, head: HeadName) -> list[ShardMap]:
    """Megatron's keys, with the padding that the checkpoint has, of its modules with and without Transformer Engine."""
    embedding = index.tensors.get(f"{spec.table.embedding.names.megatron}.weight")
    rows = max(spec.dims.vocab, embedding.shape[0]) if embedding else None
    return [spec.checkpoint_map(head, vocab_rows=rows, transformer_engine=te) for te in (True, False)]


def _stacked(index: Index) -> Index:
    """A Megatron checkpoint's index with layers and experts as leading axes.

    Some models write them so themselves; others a tensor for each (``non_homogeneous_layers`` and
    ``singleton_local_shards`` of TransformerBlock, SequentialMLP and MLP, megatron-core 0.16.1).

    Raises:
        BrokenError: tensors that belong together differ in shape or dtype; all of them are listed.
    """
    places = {key: _stack(key) for key in index.tensors}
    counts: dict[tuple[str, int], int] = {}
    for stack in places.values():
        for axis, at in enumerate(stack.at):
            counts[stack.key, axis] = max(counts.get((stack.key, axis), 0), at + 1)
    tensors: dict[str, TensorInfo] = {}
    problems: list[str] = []
    for key, stack in places.items():
        info, leading = index.tensors[key], tuple(counts[stack.key, axis] for axis in range(len(stack.at)))
        rows, *inner = info.shape or (1,)
        together = TensorInfo((*leading, rows * stack.halves, *inner), info.dtype)
        if tensors.setdefault(stack.key, together) != together:
            problems.append(f"{key} is {list(info.shape)} of {info.dtype}, unlike others of {stack.key}")
    if problems:
        raise BrokenError("tensors that belong together differ", problems)
    return Index(tensors=tensors, chunks=[*_moved(index, places)], objects=index.objects)


@dataclass(frozen=True, kw_only=True)
class _Stack:
    """Where a tensor belongs: in the tensor ``key``, at indices of its leading axes, in one half of its rows."""

    key: str
    at: tuple[int, ...]
    halves: int
    half: int


def _stack(key: str) -> _Stack:
    at: tuple[int, ...] = ()
    layer = _LAYER.fullmatch(key)
    if layer:
        key, at = f"decoder.layers.{layer[2]}", (int(layer[1]),)
    expert = _EXPERT.fullmatch(key)
    if layer and expert:
        key, at = f"{expert[1]}.{expert[3]}", (*at, int(expert[2]))
    half = _HALF.fullmatch(key)
    return _Stack(key=half[1] if half else key, at=at, halves=2 if half else 1, half="wv".index(half[2]) if half else 0)


def _moved(index: Index, places: Mapping[str, _Stack]) -> Iterator[Chunk]:
    for chunk in index.chunks:
        stack, rows = places[chunk.key], (index.tensors[chunk.key].shape or (1,))[0]
        (first, *start), (last, *stop) = chunk.box.start or (0,), chunk.box.stop or (1,)
        moved = rows * stack.half
        box = Box((*stack.at, first + moved, *start), (*(at + 1 for at in stack.at), last + moved, *stop))
        yield replace(chunk, key=stack.key, box=box)
