"""Files that survive a crash: written durably, replaced at once, told by their digest."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path


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
