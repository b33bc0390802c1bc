"""The units of a conversion: what one process reads and writes in one go, and the record of it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash

from megarl.convert.chunks import Block
from megarl.convert.stored import BoxReader, Stored, as_bytes

_PART_BYTES = 256 << 20
_PARTS = 1024
_READ_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Part:
    """Blocks that are written to a file one after the other.

    Args:
        file: relative to the output.
        start: of the part in the file, in bytes.
        archived: each block becomes a file of ``torch.save`` within the file; otherwise bare elements.
        blocks: in order.
        sources: of their copies.
    """

    file: str
    start: int
    archived: bool
    blocks: tuple[Block, ...]
    sources: Mapping[str, Stored]

    @property
    def name(self) -> str:
        """Different from those of the other parts."""
        return f"{self.file.replace('/', '.')}.{self.start}"

    @property
    def nbytes(self) -> int:
        """Of all elements."""
        return sum(block.nbytes for block in self.blocks)

    def write(self, output: Path, scratch_bytes: int) -> Record:
        """Writes it durably. A file with several parts must exist.

        Raises:
            BrokenError, UsageError: as of ``Block.read``.
            OSError: it cannot be written; the file is named.
        """
        try:
            return self._write(output, scratch_bytes)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(error.filename or output / self.file)) from None

    def _write(self, output: Path, scratch_bytes: int) -> Record:
        with BoxReader(scratch_bytes) as reader, open(output / self.file, "wb" if self.archived else "r+b") as file:
            file.seek(self.start)
            stream, ends = _Digesting(file), [0]
            archive: Any = stream
            for block in self.blocks:
                values = block.read(self.sources, reader)
                torch.save(values, archive) if self.archived else stream.write(as_bytes(values))
                ends.append(stream.nbytes)
                del values  # before the next block has memory
            file.flush()
            os.fsync(file.fileno())
        return Record(part=self.name, file=self.file, start=self.start, ends=tuple(ends), digest=stream.digest)


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a part has become.

    Args:
        part: its name.
        file, start: where it begins.
        ends: 0, and the end of each block, counted from the start.
        digest: of the bytes (XXH3, 128 bits).
    """

    part: str
    file: str
    start: int
    ends: tuple[int, ...]
    digest: str

    def holds(self, output: Path) -> bool:
        """Whether the file has these bytes."""
        hasher, left = xxhash.xxh3_128(), self.ends[-1]
        try:
            with open(output / self.file, "rb") as file:
                file.seek(self.start)
                while left and (data := file.read(min(left, _READ_BYTES))):
                    hasher.update(data)
                    left -= len(data)
        except OSError:
            return False
        return not left and hasher.hexdigest() == self.digest


class _Digesting:
    """A file that is written from where it stands, and a digest of what is written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._hasher = file, xxhash.xxh3_128()
        self.nbytes = 0

    def write(self, data: Any) -> int:
        self._hasher.update(data)
        self._file.write(data)
        self.nbytes += len(data)
        return len(data)

    def flush(self) -> None:
        """``torch.save`` asks for it; the file itself is flushed once."""

    @property
    def digest(self) -> str:
        return self._hasher.hexdigest()


def part_bytes(total: int) -> int:
    """The size of the parts of an output: so that there are neither few of them nor too many files."""
    return max(_PART_BYTES, -(-total // _PARTS))


def grouped(blocks: Iterable[Block], nbytes: int) -> list[tuple[Block, ...]]:
    """Neighbouring blocks together, up to a size."""
    groups: list[list[Block]] = []
    filled = nbytes
    for block in blocks:
        if filled + block.nbytes > nbytes:
            groups.append([])
            filled = 0
        groups[-1].append(block)
        filled += block.nbytes
    return [tuple(group) for group in groups]
