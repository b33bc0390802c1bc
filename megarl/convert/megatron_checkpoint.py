"""The weights of a model in a checkpoint of Megatron's torch_dist format, Megatron-LM's or a run's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from megarl.convert.blocks import stored_map
from megarl.convert.dcp import DCPIndex, TensorChunk
from megarl.convert.find_checkpoint import FoundCheckpoint
from megarl.convert.stored import Stored
from megarl.models import ModelSpec
from megarl.types import HeadName
from megarl.weights.hf_files import CheckpointError, misfits
from megarl.weights.shard_map import Box, Manifest, ShardMap, TensorInfo

_WEIGHT = "weight."
"""Prefix of the keys of a role's weights, in a run's checkpoint."""
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
"""Patterns of the keys of training state."""

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(.+\.mlp\.experts\.experts)\.(\d+)\.(.+)")
_HALF = re.compile(r"(.+\.linear_fc1\.(?:weight|bias))_([wv])")


@dataclass(frozen=True, kw_only=True)
class MegatronCheckpoint:
    """The weights of a checkpoint.

    Args:
        map: of the stored chunks, each a parameter.
        stored: by the same names.
        tensors: the model's canonical tensors, with their dtypes in the checkpoint.
    """

    map: ShardMap
    stored: Mapping[str, Stored]
    tensors: Mapping[str, TensorInfo]

    @classmethod
    def open(cls, found: FoundCheckpoint, spec: ModelSpec, head: HeadName) -> MegatronCheckpoint:
        """Finds the weights of a model in a checkpoint; a CheckpointError lists every tensor that does not fit."""
        index = DCPIndex.read(found.directory)
        if found.kind == "megatron":
            index = _stacked(index)
        maps = [_role_map(spec, head)] if found.kind == "megarl" else _megatron_maps(index, spec, head)
        whole = min(maps, key=lambda known: sum(key not in index.tensors for key in known.params))
        ignored = (*_TRAINING, *(key for known in maps for key in known.params))
        problems = misfits(index.tensors, Manifest(tensors=whole.params, ignored=ignored))
        if problems:
            raise CheckpointError(f"{found.directory} does not fit the {spec.family.model_type} model", problems)
        whole = replace(whole, params={key: index.tensors[key] for key in whole.params})  # its dtypes
        chunks = {f"{chunk.key}{chunk.box}": chunk for chunk in index.chunks if chunk.key in whole.params}
        dtypes = {shard.name: whole.params[shard.param].dtype for shard in whole.shards}
        return cls(
            map=stored_map(whole, {name: (chunk.key, chunk.box) for name, chunk in chunks.items()}),
            stored={name: index.stored(found.directory, chunk) for name, chunk in chunks.items()},
            tensors={name: replace(info, dtype=dtypes[name]) for name, info in spec.canonical(head).items()},
        )


def _role_map(spec: ModelSpec, head: HeadName) -> ShardMap:
    """Returns the map of a run's checkpoint, which has whole canonical tensors."""
    named = ShardMap.identity(spec.canonical(head))
    return ShardMap(
        params={_WEIGHT + name: info for name, info in named.params.items()},
        shards=tuple(shard._replace(param=_WEIGHT + shard.param) for shard in named.shards),
    )


def _megatron_maps(index: DCPIndex, spec: ModelSpec, head: HeadName) -> list[ShardMap]:
    """Returns maps of modules with and without Transformer Engine, with the checkpoint's padding of the vocabulary."""
    embedding = index.tensors.get(f"{spec.table.embedding.names.megatron}.weight")
    rows = max(spec.dims.vocab, embedding.shape[0]) if embedding else None
    return [spec.checkpoint_map(head, vocab_rows=rows, transformer_engine=te) for te in (True, False)]


def _stacked(index: DCPIndex) -> DCPIndex:
    """Returns a Megatron checkpoint's index with layers and experts as leading axes.

    Some models write them so; others write a tensor for each (``non_homogeneous_layers`` and ``singleton_local_shards``
    of TransformerBlock, SequentialMLP and MLP, megatron-core 0.19.2).
    """
    places = {key: _StackPlace.of(key) for key in index.tensors}
    counts: dict[tuple[str, int], int] = {}
    for place in places.values():
        for axis, at in enumerate(place.at):
            counts[place.key, axis] = max(counts.get((place.key, axis), 0), at + 1)
    tensors: dict[str, TensorInfo] = {}
    problems: list[str] = []
    for key, place in places.items():
        info = index.tensors[key]
        leading = tuple(counts[place.key, axis] for axis in range(len(place.at)))
        rows, *inner = info.shape or (1,)
        stacked = TensorInfo((*leading, rows * place.halves, *inner), info.dtype)
        if tensors.setdefault(place.key, stacked) != stacked:
            problems.append(f"{key} is {list(info.shape)} of {info.dtype}, unlike others of {place.key}")
    if problems:
        raise CheckpointError("tensors that belong together differ", problems)
    return DCPIndex(tensors=tensors, chunks=[*_stacked_chunks(index, places)], objects=index.objects)


@dataclass(frozen=True, kw_only=True)
class _StackPlace:
    """The place of a tensor in the tensor ``key``: indices of its leading axes, and one of the halves of its rows."""

    key: str
    at: tuple[int, ...]
    halves: int
    half: int

    @classmethod
    def of(cls, key: str) -> _StackPlace:
        at: tuple[int, ...] = ()
        layer = _LAYER.fullmatch(key)
        if layer:
            key = f"decoder.layers.{layer[2]}"
            at = (int(layer[1]),)
        expert = _EXPERT.fullmatch(key)
        if layer and expert:
            key = f"{expert[1]}.{expert[3]}"
            at = (*at, int(expert[2]))
        half = _HALF.fullmatch(key)
        if half:
            return cls(key=half[1], at=at, halves=2, half="wv".index(half[2]))
        return cls(key=key, at=at, halves=1, half=0)


def _stacked_chunks(index: DCPIndex, places: Mapping[str, _StackPlace]) -> Iterator[TensorChunk]:
    for chunk in index.chunks:
        place = places[chunk.key]
        rows = (index.tensors[chunk.key].shape or (1,))[0]
        (first, *start) = chunk.box.start or (0,)
        (last, *stop) = chunk.box.stop or (1,)
        offset = rows * place.half
        box = Box((*place.at, first + offset, *start), (*(at + 1 for at in place.at), last + offset, *stop))
        yield replace(chunk, key=place.key, box=box)
