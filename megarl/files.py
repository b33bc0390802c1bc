"""Files that survive a crash: written durably, replaced at once, told by their digest."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BLOCK = 1 << 16
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
# torch.save raises these in place of the error of its file; the second where nothing at all could be written.
_TORCH_SAVE_ERRORS = ("inline_container.cc", "basic_ios::clear: iostream error")


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
        with write_errors(path):
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
    with write_errors(partial, len(text)):
        partial.touch(mode)
        partial.write_text(text, encoding="utf-8")
    sync(partial)
    partial.replace(path)
    sync(path.parent)


@contextmanager
def write_errors(path: Path, nbytes: int | None = None) -> Iterator[None]:
    """Makes a failed write name its file, its cause and, where the disk is full, the space that is needed and free.

    ``torch.save`` hides the cause behind an error of its own.

    Args:
        path: what is written.
        nbytes: the size that it will have, if known.

    Raises:
        OSError: a write failed.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause = _os_error(error, path)
        if cause is None:
            raise
        reason = os.strerror(cause)
        if cause in _NO_SPACE:
            needed = "" if nbytes is None else f"{format_bytes(nbytes)} needed, "
            reason += f" ({needed}{format_bytes(shutil.disk_usage(path.parent).free)} free)"
        named = getattr(error, "filename2", None) or getattr(
            error, "filename", None
        )  # the first is the target of a copy
        raise OSError(cause, reason, named or str(path)) from None


def _os_error(error: OSError | RuntimeError, path: Path) -> int | None:
    """The errno of a failed write; None of an error that is not one."""
    if isinstance(error, OSError):
        return error.errno
    if not any(message in str(error) for message in _TORCH_SAVE_ERRORS):
        return None
    inner: BaseException | None = error
    while inner := inner.__cause__ or inner.__context__:
        if isinstance(inner, OSError) and inner.errno:
            return inner.errno
    # torch.save to a path writes without Python, and its errors have no errno.
    return errno.ENOSPC if shutil.disk_usage(path.parent).free == 0 else None


def format_bytes(nbytes: float) -> str:
    """A size for people to read, such as ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


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
