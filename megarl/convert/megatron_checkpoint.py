"""Checkpoints of Megatron's torch_dist format, Megatron-LM's and those of runs: found by a path, read as a model's."""

from __future__ import annotations

import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from megarl.convert.dcp import METADATA, DCPIndex, TensorChunk
from megarl.convert.stored import ArchivedTensor, Shifted, Sources, Stored, shards_within
from megarl.errors import UsageError
from megarl.models import ModelSpec
from megarl.models.lora import Adapters, adapter_tensors, with_head
from megarl.run.checkpoints import MANIFEST, CheckpointManifest, Checkpoints
from megarl.types import HEADS, HeadName, RoleName
from megarl.weights.hf_files import CheckpointError, misfits
from megarl.weights.plan import Copy
from megarl.weights.shard_map import Box, Manifest, Shape, ShardMap, TensorInfo

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
    checkpoints = Checkpoints(run / CHECKPOINTS)
    steps = checkpoints.steps()
    if not steps:
        raise UsageError(f"{run} has no checkpoint yet; choose another one")
    if step is None:
        step = steps[-1]
    if step not in steps:
        raise UsageError(f"{run} has no checkpoint of step {step}; there are {', '.join(map(str, steps))}")
    return checkpoints.path(step)


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


def require_megatron_format(spec: ModelSpec) -> None:
    """Raises UsageError where Megatron-LM's checkpoints have a model's weights in another order."""
    if spec.table.has_stacked_experts:
        problem = f"Megatron-LM's checkpoints of {spec.family.model_type} are not supported"
        raise UsageError(f"{problem}: they have an expert's gates before its ups, the model's files in turn")


def open_checkpoint(
    found: FoundCheckpoint, spec: ModelSpec, head: HeadName, adapters: Adapters | None = None
) -> tuple[Mapping[str, TensorInfo], Sources]:
    """Finds a model's weights in a checkpoint; a CheckpointError lists every tensor that does not fit.

    Args:
        adapters: adapters that the checkpoint of a run has in place of the weights, with a head.

    Returns:
        The canonical tensors, with their dtypes in the checkpoint, and what they are read from.
    """
    canonical = spec.canonical(head)
    if adapters is not None:
        canonical = with_head(adapter_tensors(spec, adapters), canonical)
    if found.role is None:
        require_megatron_format(spec)
        index = _stacked(DCPIndex.read(found.directory), layers=spec.table.is_uniform)
        embedding = index.tensors.get(f"{spec.table.embedding.names.megatron}.weight")
        rows = None if embedding is None else max(spec.dims.vocab, embedding.shape[0])
        maps = [spec.checkpoint_map(head, vocab_rows=rows, transformer_engine=te) for te in (True, False)]
    else:  # whole canonical tensors, whose files have digests
        checkpoint = found.directory.parent
        CheckpointManifest.read(checkpoint).verify(checkpoint, role=found.role)
        index = DCPIndex.read(found.directory)
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
            boxes[name] = (chunk.key, chunk.box)
            tensor = ArchivedTensor(
                path=found.directory / chunk.place.relative_path,
                offset=chunk.place.offset,
                nbytes=chunk.place.length,
                info=TensorInfo(chunk.box.shape, index.tensors[chunk.key].dtype),
            )
            stored[name] = tensor
            if spec.is_centred(chunk.key):
                stored[name] = Shifted(tensor=tensor, by=1.0)
    tensors = dict(canonical)
    main = next(iter(whole.params))  # the embedding, but for adapters
    for shard in whole.shards:
        dtype = index.tensors[main if spec.is_centred(shard.param) else shard.param].dtype
        tensors[shard.name] = replace(canonical[shard.name], dtype=dtype)
    copies: dict[str, list[Copy]] = defaultdict(list)
    for param, box, name, region, transposed in shards_within(whole, boxes):
        copies[name].append(Copy(param, box, name, region, tensors[name].dtype, transposed))
    for name, info in tensors.items():
        size = math.prod(info.shape)
        present = sum(copy.target_box.size for copy in copies[name])
        if present != size:
            problems.append(f"{present} of {size} elements of {name} are there")
    if problems:
        raise CheckpointError(f"{found.directory} is broken", problems)
    return tensors, Sources(stored=stored, copies=copies)


def _stacked(index: DCPIndex, *, layers: bool) -> DCPIndex:
    """Returns a Megatron checkpoint's index with experts, and maybe ``layers``, as leading axes.

    Some models write them so; others write a tensor for each (``non_homogeneous_layers`` and
    ``singleton_local_shards`` of TransformerBlock, SequentialMLP and MLP, megatron-core 0.19.2).
    """
    places = {key: _stack_place(key, layers) for key in index.tensors}
    counts: Counter[tuple[str, int]] = Counter()
    for stack, at, _, _ in places.values():
        for axis, place in enumerate(at):
            counts[stack, axis] = max(counts[stack, axis], place + 1)
    tensors: dict[str, TensorInfo] = {}
    for key, (stack, at, _, halves) in places.items():
        info = index.tensors[key]
        rows, *inner = info.shape or (1,)
        leading = [counts[stack, axis] for axis in range(len(at))]
        stacked = TensorInfo((*leading, rows * halves, *inner), info.dtype)
        if tensors.setdefault(stack, stacked) != stacked:
            found = f"{list(info.shape)} of {info.dtype}"
            raise CheckpointError(f"{key} is {found}, unlike others of {stack}")
    chunks: list[TensorChunk] = []
    for chunk in index.chunks:
        stack, at, half, _ = places[chunk.key]
        rows, *_ = index.tensors[chunk.key].shape or (1,)
        first, *start = chunk.box.start or (0,)
        end, *stop = chunk.box.stop or (1,)
        after = [i + 1 for i in at]
        box = Box((*at, first + rows * half, *start), (*after, end + rows * half, *stop))
        chunks.append(TensorChunk(stack, box, chunk.place))
    return DCPIndex(tensors=tensors, chunks=chunks)


def _stack_place(key: str, layers: bool) -> tuple[str, Shape, int, int]:
    """Returns the stacked tensor of a key, the indices in it, and which part of how many of rows."""
    at: Shape = ()
    layer = _LAYER.fullmatch(key)
    if layer and layers:
        key = f"decoder.layers.{layer[2]}"
        at = (int(layer[1]),)
    expert = _EXPERT.fullmatch(key)
    if layer and expert:
        key = f"{expert[1]}.{expert[3]}"
        at = (*at, int(expert[2]))
    half = _HALF.fullmatch(key)
    if half:
        return half[1], at, "wv".index(half[2]), 2
    return key, at, 0, 1
