"""Checkpoints of Megatron's torch_dist format, Megatron-LM's and those of runs: found by a path, read as a model's."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from megarl.convert.dcp import METADATA, DCPIndex, TensorChunk
from megarl.convert.stored import Assembly, Stored, assemble, shards_within
from megarl.errors import UsageError
from megarl.models import ModelSpec
from megarl.run.checkpoints import MANIFEST, CheckpointManifest, Checkpoints
from megarl.types import HEADS, HeadName, RoleName
from megarl.weights.hf_files import CheckpointError, misfits
from megarl.weights.plan import Copy
from megarl.weights.shard_map import Box, Manifest, Shard, ShardMap, TensorInfo

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
"""Megatron-LM's name for weights without training state: it loads them without optimizer state."""
HF_FILES = "hf"
"""Directory of an imported checkpoint with the model's configuration and tokenizer."""
CHECKPOINTS = "checkpoints"

_ITERATION = re.compile(r"iter_(\d{7,})")

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
class FoundCheckpoint:
    """A directory of sharded tensors, with ``.metadata``.

    Args:
        root: Megatron-LM's save directory, or a run.
        role: role of a run; None in Megatron-LM's.
    """

    directory: Path
    root: Path
    role: RoleName | None = None

    def head(self, configured: HeadName) -> HeadName:
        """Returns the head of the role, or, for Megatron's, that of its configuration."""
        return configured if self.role is None else HEADS[self.role]

    def verify(self) -> None:
        """Compares the files of a role with its checkpoint's manifest; Megatron's have none."""
        if self.role is not None:
            CheckpointManifest.read(self.directory.parent).verify(self.directory.parent, role=self.role)


def find_checkpoint(path: Path, *, role: RoleName | None = None, step: int | None = None) -> FoundCheckpoint:
    """Finds the checkpoint of a path; raises UsageError where there is none, or role or step have no meaning.

    Args:
        path: Megatron-LM's save directory or one iteration in it; or a run of MegaRL, one
            checkpoint of it, or a role's directory in that.
        role: role of a run's checkpoint; the actor, or the only one, by default.
        step: step of the checkpoint; the latest by default.
    """
    # Its name and parent say what it is; links stay where they are.
    path = Path(os.path.abspath(path))
    if (path / CHECKPOINTS).is_dir():
        return _in_run(_step_directory(path, step), role)
    if (path / TRACKER).is_file() or _iterations(path):
        _refuse(path, role=role)
        return _in_megatron(path, step)
    _refuse(path, step=step)
    if (path / MANIFEST).is_file():
        return _in_run(path, role)
    _refuse(path, role=role)
    if not (path / METADATA).is_file():
        kinds = f"neither Megatron-LM's ({TRACKER} or {METADATA}) nor a run's ({CHECKPOINTS})"
        raise UsageError(f"{path} has no checkpoint: {kinds}; choose another one")
    if (path.parent / MANIFEST).is_file():
        return _in_run(path.parent, path.name)
    return FoundCheckpoint(directory=path, root=path.parent)


def _step_directory(run: Path, step: int | None) -> Path:
    steps = Checkpoints(run / CHECKPOINTS).steps()
    if not steps:
        raise UsageError(f"{run} has no checkpoint yet; choose another one")
    if step is None:
        step = steps[-1]
    if step not in steps:
        raise UsageError(f"{run} has no checkpoint of step {step}; there are {', '.join(map(str, steps))}")
    return run / CHECKPOINTS / f"step-{step}"


def _in_run(directory: Path, role: str | None) -> FoundCheckpoint:
    manifest = CheckpointManifest.read(directory)
    roles: list[RoleName] = [name for name in get_args(RoleName) if name in manifest.roles]
    if role is None:
        role = roles[0] if len(roles) == 1 else "actor"
    for name in roles:
        if name == role:
            return FoundCheckpoint(directory=directory / name, root=directory.parent.parent, role=name)
    raise UsageError(f"{directory} has no {role}; choose --role {' or '.join(roles)}")


def _in_megatron(root: Path, step: int | None) -> FoundCheckpoint:
    choice = f"choose one with --step: {', '.join(map(str, _iterations(root)))}"
    if step is None:
        if not (root / TRACKER).is_file():
            raise UsageError(f"{root} has no {TRACKER}; {choice}")
        latest = (root / TRACKER).read_text().strip()
        if latest != RELEASE and not latest.isdecimal():
            raise UsageError(f"{root / TRACKER} says {latest!r}, which is no iteration; {choice}")
        step = None if latest == RELEASE else int(latest)
    directory = root / (RELEASE if step is None else f"iter_{step:07d}")
    if not (directory / METADATA).is_file():
        raise UsageError(f"{directory} is not a checkpoint of Megatron's torch_dist format; {choice}")
    return FoundCheckpoint(directory=directory, root=root)


def _iterations(root: Path) -> list[int]:
    matches = [_ITERATION.fullmatch(path.name) for path in root.glob("iter_*")]
    return sorted(int(match[1]) for match in matches if match)


def _refuse(path: Path, *, role: str | None = None, step: int | None = None) -> None:
    """Raises UsageError for options that would have no effect."""
    if role is not None:
        raise UsageError(f"--role {role} has no meaning for {path}: roles are of a run of MegaRL; leave it out")
    if step is not None:
        raise UsageError(f"--step {step} has no meaning for {path}, which is one checkpoint; leave it out")


@dataclass(frozen=True, kw_only=True)
class MegatronCheckpoint:
    """The weights of a checkpoint.

    Args:
        tensors: the model's canonical tensors, with their dtypes in the checkpoint.
        stored: stored chunks by name.
        shards: what the chunks hold of the tensors.
    """

    tensors: Mapping[str, TensorInfo]
    stored: Mapping[str, Stored]
    shards: Sequence[Shard]

    @classmethod
    def open(cls, found: FoundCheckpoint, spec: ModelSpec, head: HeadName) -> MegatronCheckpoint:
        """Finds the weights of a model in a checkpoint; a CheckpointError lists every tensor that does not fit."""
        index = DCPIndex.read(found.directory)
        canonical = spec.canonical(head)
        if found.role is None:
            index = _stacked(index)
            embedding = index.tensors.get(f"{spec.table.embedding.names.megatron}.weight")
            rows = None if embedding is None else max(spec.dims.vocab, embedding.shape[0])
            maps = [spec.checkpoint_map(head, vocab_rows=rows, transformer_engine=te) for te in (True, False)]
        else:  # whole canonical tensors
            named = ShardMap.identity(canonical)
            shards = tuple(shard._replace(param=_WEIGHT + shard.param) for shard in named.shards)
            maps = [ShardMap(params={_WEIGHT + name: info for name, info in canonical.items()}, shards=shards)]
        whole = min(maps, key=lambda known: len(known.params.keys() - index.tensors.keys()))
        ignored = [*_TRAINING]
        for known in maps:
            ignored += known.params
        problems = misfits(index.tensors, Manifest(tensors=whole.params, ignored=tuple(ignored)))
        if problems:
            model = f"the {spec.family.model_type} model"
            raise CheckpointError(f"{found.directory} does not fit {model}", problems)
        stored: dict[str, Stored] = {}
        boxes: dict[str, tuple[str, Box]] = {}
        for chunk in index.chunks:
            if chunk.key in whole.params:
                name = f"{chunk.key}{chunk.box}"
                stored[name] = index.stored(found.directory, chunk)
                boxes[name] = (chunk.key, chunk.box)
        tensors: dict[str, TensorInfo] = {}
        for shard in whole.shards:
            dtype = index.tensors[shard.param].dtype
            tensors[shard.name] = replace(canonical[shard.name], dtype=dtype)
        shards = list(shards_within(whole, boxes))
        _check_coverage(found.directory, tensors, shards)
        return cls(tensors={name: tensors[name] for name in canonical}, stored=stored, shards=shards)

    def assemble(self, groups: Iterable[Mapping[str, TensorInfo]]) -> list[Assembly]:
        """Returns an assembly for each group of canonical tensors, which may have other dtypes."""
        copies: list[Copy] = []
        for param, box, name, region, transposed in self.shards:
            copies.append(Copy(param, box, name, region, self.tensors[name].dtype, transposed))
        return assemble(groups, copies, self.stored)


def _check_coverage(directory: Path, tensors: Mapping[str, TensorInfo], shards: Sequence[Shard]) -> None:
    """Raises CheckpointError for tensors of which elements are in no chunk."""
    found: Counter[str] = Counter()
    for shard in shards:
        found[shard.name] += shard.region.size
    problems: list[str] = []
    for name, info in tensors.items():
        size = math.prod(info.shape)
        if found[name] != size:
            problems.append(f"{found[name]} of {size} elements of {name} are there")
    if problems:
        raise CheckpointError(f"{directory} is broken", problems)


def _stacked(index: DCPIndex) -> DCPIndex:
    """Returns a Megatron checkpoint's index with layers and experts as leading axes.

    Some models write them so; others write a tensor for each (``non_homogeneous_layers`` and
    ``singleton_local_shards`` of TransformerBlock, SequentialMLP and MLP, megatron-core 0.19.2).
    """
    places = {key: _StackPlace.of(key) for key in index.tensors}
    counts: Counter[tuple[str, int]] = Counter()
    for place in places.values():
        for axis, at in enumerate(place.at):
            counts[place.key, axis] = max(counts[place.key, axis], at + 1)
    tensors: dict[str, TensorInfo] = {}
    for key, place in places.items():
        info = index.tensors[key]
        leading = tuple(counts[place.key, axis] for axis in range(len(place.at)))
        rows, *inner = info.shape or (1,)
        stacked = TensorInfo((*leading, rows * place.halves, *inner), info.dtype)
        if tensors.setdefault(place.key, stacked) != stacked:
            raise CheckpointError(f"{key} is {list(info.shape)} of {info.dtype}, unlike others of {place.key}")
    chunks = list(_stacked_chunks(index, places))
    return DCPIndex(tensors=tensors, chunks=chunks, objects=index.objects)


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
        rows, *_ = index.tensors[chunk.key].shape or (1,)
        first, *start = chunk.box.start or (0,)
        last, *stop = chunk.box.stop or (1,)
        offset = rows * place.half
        after = tuple(at + 1 for at in place.at)
        box = Box((*place.at, first + offset, *start), (*after, last + offset, *stop))
        yield replace(chunk, key=place.key, box=box)
