"""Files of ``torch.save`` as a list of what is where: nothing in them is executed, and no tensor is read.

Such a file is a zip archive without compression: ``*/data.pkl`` is a pickle in which storages are references, and
``*/data/<key>`` has the bytes of a storage (torch/serialization.py).
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

from megarl.convert.errors import BrokenError
from megarl.convert.stored import StoredTensor
from megarl.weights.shard_map import ITEM_BYTES, Shape, TensorInfo

_LOCAL_HEADER_BYTES = 30
_STORAGES = {"DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16"}
_STORAGES |= {"BFloat16Storage": "bfloat16", "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16"}
_STORAGES |= {"CharStorage": "int8", "ByteStorage": "uint8", "BoolStorage": "bool"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredItem:
    """A tensor as ``torch.save`` wrote it among other things in a file.

    Args:
        path: the file.
        offset, nbytes: where the archive lies in it.
        info: what it is said to be; its leading axes of 1 may be missing in the file.
    """

    path: Path
    offset: int
    nbytes: int
    info: TensorInfo

    def locate(self) -> StoredTensor:
        """Where its elements lie.

        Raises:
            BrokenError: something else lies there.
        """
        found = read_index(self.path, self.offset, self.nbytes)
        if isinstance(found, StoredTensor) and found.strides is not None and found.info.dtype == self.info.dtype:
            leading = len(self.info.shape) - len(found.info.shape)
            if (1,) * leading + found.info.shape == self.info.shape:
                return replace(found, info=self.info, strides=(0,) * leading + found.strides)
        held = f"{found.info}" if isinstance(found, StoredTensor) else type(found).__name__
        raise BrokenError(f"{self.path.name} is corrupted", [f"at byte {self.offset} is {held}, not {self.info}"])


def read_index(path: Path, offset: int = 0, nbytes: int | None = None) -> Any:
    """What a file of ``torch.save`` holds: dicts, lists and numbers, with a ``StoredTensor`` for each tensor.

    Args:
        path: the file.
        offset, nbytes: where the archive lies in it; the whole file by default.

    Raises:
        BrokenError: it is damaged, or holds objects of other kinds; the message names them.
    """
    try:
        with path.open("rb") as stream:
            return _Archive(path, stream, offset, nbytes).load()
    except OSError as error:
        raise BrokenError(f"{path.name} cannot be read", [f"{error.strerror}: {path}"]) from None
    except BrokenError:
        raise
    except Exception as error:  # a damaged archive or pickle raises anything
        where = "" if nbytes is None else f" at byte {offset}"
        raise BrokenError(f"{path.name} is corrupted", [f"no file of torch.save{where}: {error}"]) from None


class _Archive:
    """An open file of ``torch.save``."""

    def __init__(self, path: Path, stream: BinaryIO, offset: int, nbytes: int | None) -> None:
        self._path, self._stream, self._base = path, stream, offset
        part = stream if nbytes is None else cast(BinaryIO, io.BufferedReader(_Part(stream, offset, nbytes)))
        self._zip = zipfile.ZipFile(part)
        self._entries = {name.partition("/")[2]: self._zip.getinfo(name) for name in self._zip.namelist()}

    def load(self) -> Any:
        if "byteorder" in self._entries and self._zip.read(self._entries["byteorder"]) != b"little":
            raise ValueError("its byte order is not little endian")
        return _Unpickler(io.BytesIO(self._zip.read(self._entries["data.pkl"])), self).load()

    def storage(self, key: str) -> int:
        """Where in the file the bytes of a storage begin."""
        entry = self._entries[f"data/{key}"]
        if entry.compress_type != zipfile.ZIP_STORED:
            raise ValueError("it is compressed")
        start = self._base + entry.header_offset
        self._stream.seek(start)
        header = self._stream.read(_LOCAL_HEADER_BYTES)
        name, extra = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
        return start + _LOCAL_HEADER_BYTES + name + extra

    def tensor(self, storage: tuple[Any, ...], first: int, shape: Shape, strides: Shape) -> StoredTensor:
        """A view of a storage."""
        _, dtype, key, _, count = storage
        item = ITEM_BYTES.get(dtype, 1)
        last = first + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
        if last >= count or min((first, *strides)) < 0 or self._entries[f"data/{key}"].file_size < count * item:
            raise ValueError("a tensor lies outside its storage")
        start = self.storage(key) + first * item
        return StoredTensor(path=self._path, offset=start, info=TensorInfo(tuple(shape), dtype), strides=tuple(strides))


class _Unpickler(pickle.Unpickler):
    """Knows tensors and plain containers, and nothing that could run."""

    def __init__(self, stream: io.BytesIO, archive: _Archive) -> None:
        super().__init__(stream)
        self._archive = archive

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
        raise BrokenError(f"{self._archive._path.name} is refused", [f"it holds a {module}.{name}, not tensors alone"])

    def persistent_load(self, pid: Any) -> Any:
        return pid

    def _tensor(self, storage: Any, first: int, shape: Shape, strides: Shape, *_: Any) -> StoredTensor:
        return self._archive.tensor(storage, first, shape, strides)


class _Part(io.RawIOBase):
    """A part of an open file, as a file."""

    def __init__(self, stream: BinaryIO, offset: int, nbytes: int) -> None:
        self._stream, self._offset, self._nbytes, self._at = stream, offset, nbytes, 0

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
