"""Tensors where they lie in files, and the reading of boxes of them without the rest."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import torch

from megarl.convert.errors import BrokenError, UsageError
from megarl.weights.plan import Copy
from megarl.weights.shard_map import Box, Shape, TensorInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor in a file, uncompressed and little endian.

    Args:
        path: the file.
        offset: of its first element, in bytes.
        info: its shape and dtype.
        strides: of its axes, in elements; None where it is row-major.
    """

    path: Path
    offset: int
    info: TensorInfo
    strides: Shape | None = None

    def locate(self) -> StoredTensor:
        """Itself: it is located."""
        return self


class Stored(Protocol):
    """Something that knows in which file a tensor lies, and where, or can find out."""

    @property
    def path(self) -> Path: ...

    def locate(self) -> StoredTensor: ...


class BoxReader:
    """Reads boxes of stored tensors; keeps files open until it is closed.

    Args:
        scratch_bytes: no more memory than this is used at a time, besides what is read into, unless a single row of
            scattered elements needs it.
    """

    def __init__(self, scratch_bytes: int) -> None:
        self._scratch_bytes = scratch_bytes
        self._stack = ExitStack()
        self._files: dict[Path, int] = {}
        self._located: dict[Stored, StoredTensor] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def copy(self, stored: Stored, copy: Copy, target: torch.Tensor) -> None:
        """Reads a copy's source box.

        Args:
            stored: the copy's source.
            target: of the shape of the copy's target box; gets the values, cast to its dtype.

        Raises:
            BrokenError, UsageError: as of ``read``; also, the source is not what it should be.
        """
        if stored not in self._located:
            self._located[stored] = stored.locate()
        self.read(self._located[stored], copy.source_box, _arranged_back(copy, target))

    def read(self, stored: StoredTensor, box: Box, target: torch.Tensor) -> None:
        """Reads a box into a tensor of its shape.

        Raises:
            BrokenError: the file ends before.
            UsageError: finite values are too large for the tensor's dtype.
        """
        dtype: torch.dtype = getattr(torch, stored.info.dtype)
        strides = stored.strides or row_major(stored.info.shape)
        for part, inner in _strips(box, strides, max(1, self._scratch_bytes // dtype.itemsize)):
            start, span = _extent(part, strides)
            offset, into = stored.offset + start * dtype.itemsize, target[inner]
            direct = into.dtype == dtype and into.is_contiguous() and span == part.size and _ordered(part, strides)
            raw = into if direct else torch.empty(span, dtype=dtype)
            self._fill(stored.path, offset, raw)
            if not direct:
                into.copy_(raw.as_strided(part.shape, strides))
                if _overflows(raw.as_strided(part.shape, strides), into):
                    wider = "bfloat16" if into.dtype == torch.float16 else stored.info.dtype
                    held = f"{into.dtype}".removeprefix("torch.")
                    raise UsageError(f"{stored.path.name} has values that {held} cannot hold; choose --dtype {wider}")

    def _fill(self, path: Path, offset: int, tensor: torch.Tensor) -> None:
        """Reads bytes into a contiguous tensor."""
        left = as_bytes(tensor)
        while left:
            try:
                count = os.preadv(self._file(path), [left], offset)
            except OSError as error:
                raise BrokenError(f"{path.name} cannot be read", [f"{error.strerror}: {path}"]) from None
            if count == 0:
                raise BrokenError(f"{path.name} cannot be read", [f"it ends {len(left)} bytes before a tensor does"])
            left, offset = left[count:], offset + count

    def _file(self, path: Path) -> int:
        if path not in self._files:
            try:
                self._files[path] = os.open(path, os.O_RDONLY)
            except OSError as error:
                raise BrokenError(f"{path.name} cannot be read", [f"{error.strerror}: {path}"]) from None
            self._stack.callback(os.close, self._files[path])
        return self._files[path]


def _overflows(values: torch.Tensor, cast: torch.Tensor) -> bool:
    """Whether finite values have become infinite."""
    if torch.finfo(cast.dtype).max >= torch.finfo(values.dtype).max or not cast.isinf().any():
        return False
    return bool((cast.isinf() & values.isfinite()).any())


def _arranged_back(copy: Copy, target: torch.Tensor) -> torch.Tensor:
    """A view of a copy's target with the axes of its source box."""
    shape = copy.source_box.shape
    if copy.transposed:
        return target.view(*shape[:-2], shape[-1], shape[-2]).swapaxes(-2, -1)
    return target.view(shape)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    flat: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def row_major(shape: Shape) -> Shape:
    """The strides, in elements, of a tensor of this shape without gaps."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _extent(box: Box, strides: Shape) -> tuple[int, int]:
    """The first element of a box in its file, and the number of elements up to its last one."""
    start = sum(at * stride for at, stride in zip(box.start, strides, strict=True))
    return start, 1 + sum((extent - 1) * stride for extent, stride in zip(box.shape, strides, strict=True))


def _ordered(box: Box, strides: Shape) -> bool:
    """Whether elements that follow each other in the box do so in the file, if that has no gaps."""
    inner = [stride for extent, stride in zip(box.shape, strides, strict=True) if extent > 1]
    return inner == sorted(inner, reverse=True)


def _strips(box: Box, strides: Shape, size: int) -> Iterator[tuple[Box, tuple[slice, ...]]]:
    """Parts of a box, each within a run of ``size`` elements of the file, and where in the box they are."""
    pending = [box]
    while pending:
        part = pending.pop()
        _, span = _extent(part, strides)
        if span <= size or part.size == 1:
            moved = zip(part.start, part.stop, box.start, strict=True)
            yield part, tuple(slice(a - origin, b - origin) for a, b, origin in moved)
        else:
            pending += reversed(part.split(-(-part.size // 2)))
