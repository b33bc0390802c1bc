"""Files that survive a crash: written durably, replaced at once, told by their digest."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """What a file must be.

    Args:
        path: relative to a directory that the context tells.
        nbytes: its size.
        sha256: digest of its content, hexadecimal.
    """

    path: str
    nbytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path, root: Path) -> FileRecord:
        """Reads a file and describes it, relative to ``root``."""
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
            return cls(path=path.relative_to(root).as_posix(), nbytes=stream.tell(), sha256=digest)


def sync(path: Path) -> None:
    """Makes a file's content, or a directory's list of names, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, text: str, mode: int = 0o666) -> None:
    """Replaces a file at once: after a crash it has its old content or the new one, never a part.

    Args:
        path: of the file.
        text: its new content.
        mode: its permissions, of which the umask takes some away.
    """
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    partial.touch(mode)
    partial.write_text(text, encoding="utf-8")
    sync(partial)
    partial.replace(path)
    sync(path.parent)


_BLOCK = 1 << 16


def read_lines(path: Path, last: int | None = None) -> list[dict[str, Any]]:
    """The objects of a file, in order; a file that is missing has none.

    A line that is not whole or is no object is left out: its writer is at work, or was killed.

    Args:
        path: of the file.
        last: how many to read at most, from the file's end; None reads all.
    """
    try:
        text = path.read_bytes() if last is None else _end(path, last)
    except FileNotFoundError:
        return []
    found = [_object(line) for line in text.splitlines(keepends=True)]
    whole = [entry for entry in found if entry is not None]
    return whole if last is None else whole[-last:]


def _end(path: Path, lines: int) -> bytes:
    """As much of a file's end as has so many whole lines, and one that may not be whole."""
    with path.open("rb") as file:
        start, text = file.seek(0, 2), b""
        while start > 0 and text.count(b"\n") <= lines:
            size = min(_BLOCK, start)
            start = file.seek(start - size)
            text = file.read(size) + text
        return text if start == 0 else text[text.index(b"\n") + 1 :]


def _object(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
