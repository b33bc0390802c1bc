"""Tensors in files, also in those of ``torch.save``: their places, and reading boxes of them without the rest.

A file of ``torch.save`` is a zip archive without compression: ``*/data.pkl`` is a pickle in which storages are
references, and ``*/data/<key>`` has the bytes of a storage (torch/serialization.py). Nothing in it is executed.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from operator import sub
from pathlib import Path
from typing import Any, BinaryIO, Self, cast

import torch

from megarl.errors import UsageError
from megarl.weights.hf_files import CheckpointError
from megarl.weights.plan import Copy
from megarl.weights.shard_map import ITEM_BYTES, Box, Shape, TensorInfo

_ZIP_HEADER_BYTES = 30
_STORAGES = {"DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16"}
_STORAGES |= {"BFloat16Storage": "bfloat16", "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16"}
_STORAGES |= {"CharStorage": "int8", "ByteStorage": "uint8", "BoolStorage": "bool"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor in a file, uncompressed and little endian.

    Args:
        offset: of the first element, in bytes.
        strides: in elements; None where it is row-major.
    """

    path: Path
    offset: int
    info: TensorInfo
    strides: Shape | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A tensor in an archive of ``torch.save``, which ``locate`` reads.

    Args:
        offset, nbytes: of the archive in the file.
        info: as expected; leading axes of 1 may be missing in the archive.
    """

    path: Path
    offset: int
    nbytes: int
    info: TensorInfo

    def locate(self) -> StoredTensor:
        """Finds the elements; raises CheckpointError for another tensor or object."""
        found = read_torch_file(self.path, self.offset, self.nbytes)
        if isinstance(found, StoredTensor) and found.strides is not None and found.info.dtype == self.info.dtype:
            leading = len(self.info.shape) - len(found.info.shape)
            if (1,) * leading + found.info.shape == self.info.shape:
                return replace(found, info=self.info, strides=(0,) * leading + found.strides)
        what = f"{found.info}" if isinstance(found, StoredTensor) else type(found).__name__
        raise CheckpointError(f"{self.path.name} is corrupted", [f"at byte {self.offset} is {what}, not {self.info}"])


Stored = StoredTensor | SavedTensor


class BoxReader:
    """Reads boxes of stored tensors; keeps files open until it is closed.

    Args:
        scratch_bytes: memory to use at a time, besides the target; exceeded only by a single row of scattered elements.
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
        """Reads a copy's source box into a tensor of the shape of its target box; see ``read``."""
        if stored not in self._located:
            self._located[stored] = stored if isinstance(stored, StoredTensor) else stored.locate()
        shape = copy.source_box.shape
        if copy.transposed:
            view = target.view(*shape[:-2], shape[-1], shape[-2]).swapaxes(-2, -1)
        else:
            view = target.view(shape)
        self.read(self._located[stored], copy.source_box, view)

    def read(self, stored: StoredTensor, box: Box, target: torch.Tensor) -> None:
        """Reads a box into a tensor of its shape; raises UsageError where finite values are too large for its dtype."""
        dtype: torch.dtype = getattr(torch, stored.info.dtype)
        strides = stored.strides or row_major(stored.info.shape)
        for part, inner in _strips(box, strides, max(1, self._scratch_bytes // dtype.itemsize)):
            start, span = _extent(part, strides)
            offset = stored.offset + start * dtype.itemsize
            into = target[inner]
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
        left = as_bytes(tensor)
        try:
            if path not in self._files:
                self._files[path] = os.open(path, os.O_RDONLY)
                self._stack.callback(os.close, self._files[path])
            while left:
                count = os.preadv(self._files[path], [left], offset)
                if count == 0:
                    problem = f"it ends {len(left)} bytes before a tensor does"
                    raise CheckpointError(f"{path.name} cannot be read", [problem])
                left = left[count:]
                offset = offset + count
        except OSError as error:
            raise CheckpointError(f"{path.name} cannot be read", [f"{error.strerror}: {path}"]) from None


def read_torch_file(path: Path, offset: int = 0, nbytes: int | None = None) -> Any:
    """Reads a file of ``torch.save``: dicts, lists and numbers, with a ``StoredTensor`` for each tensor.

    Args:
        offset, nbytes: of the archive in the file; the whole file by default.
    """
    try:
        with path.open("rb") as stream:
            return _ArchiveUnpickler(path, stream, offset, nbytes).load()
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read", [f"{error.strerror}: {path}"]) from None
    except CheckpointError:
        raise
    except Exception as error:  # a damaged archive or pickle raises anything
        where = "" if nbytes is None else f" at byte {offset}"
        raise CheckpointError(f"{path.name} is corrupted", [f"no file of torch.save{where}: {error}"]) from None


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor."""
    flat: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def row_major(shape: Shape) -> Shape:
    """Returns the strides, in elements, of a tensor of this shape without gaps."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def relative_to(box: Box, origin: Shape) -> Box:
    """Returns the box in coordinates that begin at an origin."""
    return Box(tuple(map(sub, box.start, origin)), tuple(map(sub, box.stop, origin)))


def _overflows(values: torch.Tensor, cast: torch.Tensor) -> bool:
    """Returns whether finite values have become infinite."""
    if torch.finfo(cast.dtype).max >= torch.finfo(values.dtype).max or not cast.isinf().any():
        return False
    return bool((cast.isinf() & values.isfinite()).any())


def _extent(box: Box, strides: Shape) -> tuple[int, int]:
    """Returns the first element of a box in its file, and the number of elements up to its last one."""
    start = sum(at * stride for at, stride in zip(box.start, strides, strict=True))
    return start, 1 + sum((extent - 1) * stride for extent, stride in zip(box.shape, strides, strict=True))


def _ordered(box: Box, strides: Shape) -> bool:
    """Returns whether the elements of a box without gaps are in the file in row-major order."""
    inner = [stride for extent, stride in zip(box.shape, strides, strict=True) if extent > 1]
    return inner == sorted(inner, reverse=True)


def _strips(box: Box, strides: Shape, size: int) -> Iterator[tuple[Box, tuple[slice, ...]]]:
    """Yields parts of a box, each within ``size`` consecutive elements of the file, and their indices in the box."""
    pending = [box]
    while pending:
        part = pending.pop()
        _, span = _extent(part, strides)
        if span <= size or part.size == 1:
            yield part, relative_to(part, box.start).slices
        else:
            pending += reversed(part.split(-(-part.size // 2)))


class _ArchiveUnpickler(pickle.Unpickler):
    """Reads an archive of ``torch.save``; knows tensors and plain containers, and nothing that could run."""

    def __init__(self, path: Path, stream: BinaryIO, offset: int, nbytes: int | None) -> None:
        part = stream if nbytes is None else cast(BinaryIO, io.BufferedReader(_FilePart(stream, offset, nbytes)))
        archive = zipfile.ZipFile(part)
        self._path = path
        self._stream = stream
        self._base = offset
        self._entries = {name.partition("/")[2]: archive.getinfo(name) for name in archive.namelist()}
        if "byteorder" in self._entries and archive.read(self._entries["byteorder"]) != b"little":
            raise ValueError("its byte order is not little endian")
        super().__init__(io.BytesIO(archive.read(self._entries["data.pkl"])))

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        known: Mapping[tuple[str, str], Any] = {
            ("torch._utils", "_rebuild_tensor_v2"): self._tensor,
            ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
            ("collections", "OrderedDict"): OrderedDict,
        }
        if (module, name) in known:
            return known[module, name]
        raise CheckpointError(f"{self._path.name} is refused", [f"it holds a {module}.{name}, not tensors alone"])

    def persistent_load(self, pid: Any) -> Any:
        return pid

    def _tensor(self, storage: tuple[Any, ...], first: int, shape: Shape, strides: Shape, *_: Any) -> StoredTensor:
        """Returns a view of a storage, with the arguments of torch._utils._rebuild_tensor_v2."""
        _, dtype, key, _, count = storage
        item = ITEM_BYTES.get(dtype, 1)
        last = first + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
        if last >= count or min((first, *strides)) < 0 or self._entries[f"data/{key}"].file_size < count * item:
            raise ValueError("a tensor lies outside its storage")
        start = self._start(key) + first * item
        info = TensorInfo(tuple(shape), dtype)
        return StoredTensor(path=self._path, offset=start, info=info, strides=tuple(strides))

    def _start(self, key: str) -> int:
        """Returns the first byte of a storage in the file."""
        entry = self._entries[f"data/{key}"]
        if entry.compress_type != zipfile.ZIP_STORED:
            raise ValueError("it is compressed")
        start = self._base + entry.header_offset
        self._stream.seek(start)
        header = self._stream.read(_ZIP_HEADER_BYTES)
        name, extra = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
        return start + _ZIP_HEADER_BYTES + name + extra


class _FilePart(io.RawIOBase):
    """A part of an open file, as a file."""

    def __init__(self, stream: BinaryIO, offset: int, nbytes: int) -> None:
        self._stream = stream
        self._offset = offset
        self._nbytes = nbytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._at = offset + (0, self._at, self._nbytes)[whence]
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        self._stream.seek(self._offset + self._at)
        data = self._stream.read(max(0, min(len(buffer), self._nbytes - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
