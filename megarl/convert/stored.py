"""Stored tensors, and assemblies: tensors of the output that are made of them together."""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.checkpoint.utils import _create_file_view  # pyright: ignore[reportPrivateUsage]

from megarl.errors import UsageError
from megarl.models import ModelSpec, model_spec
from megarl.weights.hf_files import CheckpointError, HFDirectory, has_weights, read_config
from megarl.weights.plan import Copy
from megarl.weights.shard_map import Box, Manifest, Shape, Shard, ShardMap, TensorInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class SafeTensor:
    """A tensor in a safetensors file, or rows of one at an index of its first axis.

    Args:
        index, row: where these are; None: the whole tensor.
    """

    path: Path
    name: str
    info: TensorInfo
    index: int | None = None
    row: int = 0

    def read_rows(self, first: int, stop: int) -> torch.Tensor:
        """Returns the rows [first, stop) of the first axis; raises CheckpointError where the file cannot be read."""
        with _named_errors(self.path), safe_open(self.path, framework="pt") as reader:
            stored = reader.get_slice(self.name)
            if self.index is None:
                return stored[first:stop]
            return stored[self.index, self.row + first : self.row + stop]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedTensor:
    """A tensor in a file of ``torch.save`` that is a part of another file.

    Args:
        offset: position of the inner file, in bytes.
        nbytes: size of the inner file.
        info: expected tensor; leading axes of 1 may be missing in the inner file.
    """

    path: Path
    offset: int
    nbytes: int
    info: TensorInfo

    def read_rows(self, first: int, stop: int) -> torch.Tensor:
        """Reads the tensor and returns rows of it; raises CheckpointError for another tensor or object."""
        with _named_errors(self.path, f" at byte {self.offset}"), open(self.path, "rb") as file:
            view: Any = _create_file_view(file, self.offset, self.nbytes)
            found: object = torch.load(view, map_location="cpu", weights_only=True)
        if isinstance(found, torch.Tensor) and found.dtype == getattr(torch, self.info.dtype):
            leading = len(self.info.shape) - found.dim()
            if (1,) * leading + tuple(found.shape) == self.info.shape:
                return found.reshape(self.info.shape)[first:stop]
        problem = f"at byte {self.offset} is no {self.info}"
        raise CheckpointError(f"{self.path.name} is corrupted", [problem])


@dataclass(frozen=True, slots=True, kw_only=True)
class Shifted:
    """A stored tensor plus a number, in float64."""

    tensor: SafeTensor | ArchivedTensor
    by: float

    @property
    def path(self) -> Path:
        return self.tensor.path

    @property
    def info(self) -> TensorInfo:
        return self.tensor.info

    def read_rows(self, first: int, stop: int) -> torch.Tensor:
        return self.tensor.read_rows(first, stop).double() + self.by


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """A stored matrix W + scale * B A, in float32.

    Args:
        transposed: whether W is stored as [inputs, outputs].
    """

    base: SafeTensor
    a: SafeTensor
    b: SafeTensor
    scale: float
    transposed: bool

    @property
    def path(self) -> Path:
        return self.base.path

    @property
    def info(self) -> TensorInfo:
        return self.base.info

    def read_rows(self, first: int, stop: int) -> torch.Tensor:
        a = self.a.read_rows(0, self.a.info.shape[0]).float()
        if self.transposed:
            b = self.b.read_rows(0, self.b.info.shape[0]).float()
            product = a.T[first:stop] @ b.T
        else:
            product = self.b.read_rows(first, stop).float() @ a
        return self.base.read_rows(first, stop).float() + self.scale * product


Stored = SafeTensor | ArchivedTensor | Shifted | Merged


def open_hf(directory: Path, manifest: Manifest) -> Mapping[str, Stored]:
    """Returns the tensors of a manifest, by canonical name, in a Hugging Face directory; raises CheckpointError."""
    files = HFDirectory(directory)
    files.check(manifest)
    stored: dict[str, Stored] = {}
    for name, info in files.tensors.items():
        path = files.file_of[name]
        if name not in manifest.stacks:
            stored[manifest.canonical(name)] = SafeTensor(path=path, name=name, info=info)
            continue
        for shard in manifest.shards(name, info):
            index, row, *_ = shard.box.start
            member = TensorInfo(shard.region.shape, info.dtype)
            stored[shard.name] = SafeTensor(path=path, name=name, info=member, index=index, row=row)
    return {name: stored[name] for name in manifest.tensors}


def open_untrained(directory: Path | None, spec: ModelSpec) -> Mapping[str, Stored]:
    """Returns the tensors of a model's directory that pass through untouched; there is no directory of a random one."""
    stored: dict[str, Stored] = {}
    if directory is None or not spec.untrained:
        return stored
    if has_weights(directory):
        source = HFDirectory(directory)
        for name, info in source.matching(spec.untrained).items():
            stored[name] = SafeTensor(path=source.file_of[name], name=name, info=info)
    return stored


def read_spec(directory: Path) -> ModelSpec:
    """Reads the model that a directory's ``config.json`` describes; raises UsageError where there is none."""
    try:
        return model_spec(read_config(directory))
    except CheckpointError as error:  # which names the file
        raise UsageError(f"{error}; name a model's directory with --hf") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{directory}: {error}") from None


@contextmanager
def _named_errors(path: Path, where: str = "") -> Iterator[None]:
    """Raises CheckpointError, with the file's name, for whatever the reading of a damaged file raises."""
    try:
        yield
    except OSError as error:
        reason = f"{error.strerror or error}: {path}"
        raise CheckpointError(f"{path.name} cannot be read", [reason]) from None
    except pickle.UnpicklingError:  # its text advises against weights_only
        reason = f"it is damaged{where}, or holds more than tensors"
        raise CheckpointError(f"{path.name} is corrupted", [reason]) from None
    except Exception as error:
        text, _, _ = str(error).partition("\n")
        reason = f"it is damaged{where}: {text}"
        raise CheckpointError(f"{path.name} is corrupted", [reason]) from None


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """Tensors, in the order in which they are written, that are in memory at the same time; zero without copies."""

    tensors: Mapping[str, TensorInfo]
    copies: Sequence[Copy]
    sources: Mapping[str, Stored]

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.tensors.values())

    @property
    def memory(self) -> int:
        """Bytes that ``read`` and a write of the tensors take at most: all of them, one more, and its copy."""
        infos = [*self.tensors.values(), *(source.info for source in self.sources.values())]
        return self.nbytes + 2 * max(info.nbytes for info in infos)

    def read(self) -> dict[str, torch.Tensor]:
        """Reads one source after the other; raises CheckpointError, or UsageError where a value does not fit."""
        tensors: dict[str, torch.Tensor] = {}
        for name, info in self.tensors.items():
            tensors[name] = torch.zeros(info.shape, dtype=getattr(torch, info.dtype))
        for name, source in self.sources.items():
            copies = [copy for copy in self.copies if copy.source == name]
            first = min(copy.source_box.start[0] for copy in copies)
            stop = max(copy.source_box.stop[0] for copy in copies)
            rows = source.read_rows(first, stop)
            for copy in copies:
                outer, *inner = copy.source_box.slices
                values = copy.arranged(rows[outer.start - first : outer.stop - first, *inner])
                copy_values(values, tensors[copy.target][copy.target_box.slices], source.path)
        return tensors


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Stored tensors by name, and the copies of them into each tensor."""

    stored: Mapping[str, Stored]
    copies: Mapping[str, Sequence[Copy]]

    @property
    def files(self) -> set[Path]:
        return {tensor.path for tensor in self.stored.values()}

    def with_whole(self, stored: Mapping[str, Stored]) -> Sources:
        """Returns these and further tensors, which are copied as they are."""
        copies = dict(self.copies)
        for name, tensor in stored.items():
            box = Box.whole(tensor.info.shape)
            copies[name] = [Copy(name, box, name, box, tensor.info.dtype, False)]
        return Sources(stored={**self.stored, **stored}, copies=copies)

    def renamed(self, prefix: str) -> Sources:
        """Returns the same for tensors of names after a prefix."""
        copies: dict[str, Sequence[Copy]] = {}
        for name, own in self.copies.items():
            copies[prefix + name] = [copy._replace(target=prefix + copy.target) for copy in own]
        return Sources(stored=self.stored, copies=copies)

    def assembly(self, tensors: Mapping[str, TensorInfo]) -> Assembly:
        copies: list[Copy] = []
        for name in tensors:
            copies += self.copies.get(name, ())
        sources = {copy.source: self.stored[copy.source] for copy in copies}
        return Assembly(tensors=tensors, copies=copies, sources=sources)


def copy_values(values: torch.Tensor, target: torch.Tensor, path: Path) -> None:
    """Copies values of a file into a tensor; raises UsageError where finite ones are too large for its dtype."""
    target.copy_(values)
    if torch.finfo(target.dtype).max >= torch.finfo(values.dtype).max or not target.isinf().any():
        return
    if (target.isinf() & values.isfinite()).any():
        wider = torch.bfloat16 if target.dtype == torch.float16 else values.dtype
        problem = f"{path.name} has values that {target.dtype} cannot hold; choose --dtype {wider}"
        raise UsageError(problem.replace("torch.", ""))


def shards_within(whole: ShardMap, boxes: Mapping[str, tuple[str, Box]]) -> Iterator[Shard]:
    """Yields what boxes of the parameters of ``whole`` hold of canonical tensors.

    Args:
        boxes: parameter and box, by the name that the box gets as a parameter.
    """
    # Parameters may stack matrices along leading axes: shards are found by these indices.
    leading: dict[str, int] = defaultdict(int)
    shards_at: dict[tuple[str, Shape], list[Shard]] = defaultdict(list)
    for shard in whole.shards:
        leading[shard.param] = shard.leading
        shards_at[shard.param, shard.box.start[: shard.leading]].append(shard)
    for name, (param, box) in boxes.items():
        stacked = [range(part.start, part.stop) for part in box.slices[: leading[param]]]
        for index in product(*stacked):
            for shard in shards_at[param, index]:
                part = shard.within(box)
                if part is not None:
                    yield part._replace(param=name, box=part.box.relative_to(box))
