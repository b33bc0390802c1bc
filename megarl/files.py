"""Durable writes, digests of files, and files of JSON lines."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

JsonObject = dict[str, Any]

_BLOCK = 1 << 16
_DEEPEST = 100
_LONGEST_LINE = 256 << 20
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
# torch.save raises these in place of the file's error; the second if nothing could be written.
_TORCH_SAVE_ERRORS = ("inline_container.cc", "basic_ios::clear: iostream error")
_SAFETENSORS_ERROR = re.compile(r"I/O error: .*\(os error (\d+)\)|IoError\(Os \{ code: (\d+)")


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """The expected content of a file; the path is relative to a root directory, the digest hexadecimal."""

    path: str
    nbytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path, root: Path) -> FileRecord:
        with open_file(path) as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
            return cls(path=path.relative_to(root).as_posix(), nbytes=stream.tell(), sha256=digest)


def sync(path: Path) -> None:
    """Makes the content of a file, or the entries of a directory, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with write_errors(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, text: str, mode: int = 0o666) -> None:
    """Replaces a file atomically: after a crash it has its old content or the new one. The umask applies to mode."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    with write_errors(partial, len(text)):
        partial.touch(mode)
        partial.write_text(text, encoding="utf-8")
    sync(partial)
    partial.replace(path)
    sync(path.parent)


def remove_tree(path: str | Path) -> None:
    """Removes a directory, however deep: `shutil.rmtree` of Python 3.12 recurses. What cannot be removed stays."""
    subprocess.run(["rm", "-rf", "--", path], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def open_file(path: str | Path) -> BufferedReader:
    """Opens a regular file to read it; raises OSError for others, such as pipes and devices, which may never end."""
    stream = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return stream


def read_json(path: str | Path, max_bytes: int = 64 << 20) -> Any:
    """Returns the content of a JSON file, which anybody may have written.

    Raises:
        OSError: it cannot be read, or is no regular file.
        ValueError: it is too large, or see `parse_json`; the message names the file.
    """
    with open_file(path) as stream:
        if os.fstat(stream.fileno()).st_size > max_bytes:
            raise ValueError(f"{path} has more than the {format_bytes(max_bytes)} that are read")
        text = stream.read()
    try:
        return parse_json(text)
    except ValueError as error:
        raise ValueError(f"{path} is {error}") from None


def parse_json(text: str | bytes) -> Any:
    """Returns the value of a text in JSON, which anybody may have written.

    Raises ValueError where it is not JSON in UTF-8, or has what cannot be written again: numbers of
    thousands of digits, halves of characters, or values in more than a hundred others.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8-sig")
        value = json.loads(text)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        line = "" if error.lineno == 1 else f"line {error.lineno}, "
        raise ValueError(f"not JSON: {error.msg}, {line}column {error.colno}") from None
    except UnicodeError as error:
        raise ValueError(f"not JSON in UTF-8: {error}") from None
    except RecursionError:
        raise ValueError(f"not JSON that can be read: it nests deeper than {_DEEPEST} values") from None
    except ValueError:  # of int
        raise ValueError("not JSON that can be read: a number has thousands of digits") from None
    if text.count("[") + text.count("{") > _DEEPEST and _is_deep(value):
        raise ValueError(f"not JSON that can be read: it nests deeper than {_DEEPEST} values")
    return value


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_DEEPEST + 1):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below += item.values()
            elif isinstance(item, list):
                below += item
        level = below
    return bool(level)


@contextmanager
def write_errors(path: Path, nbytes: int | None = None) -> Iterator[None]:
    """Raises OSError for a failed write: file, cause and, on a full disk, needed and free space."""
    try:
        yield
    except Exception as error:
        cause = _errno(error, path)
        if cause is None:
            raise
        reason = os.strerror(cause)
        if cause in NO_SPACE:
            free = f"{format_bytes(shutil.disk_usage(path.parent).free)} free"
            if nbytes is not None:
                free = f"{format_bytes(nbytes)} needed, {free}"
            reason += f" ({free})"
        # filename2 is the target of a copy.
        named = getattr(error, "filename2", None) or getattr(error, "filename", None)
        raise OSError(cause, reason, named or str(path)) from None


def full_disk(error: object) -> str | None:
    """Returns the message for a write that found no space; None for other errors."""
    if not isinstance(error, OSError) or error.errno not in NO_SPACE:
        return None
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror}; make space, and start the run again"


def _errno(error: Exception, path: Path) -> int | None:
    """Returns the error number of a failed write; None for other errors."""
    if isinstance(error, OSError):
        return error.errno
    safetensors = _SAFETENSORS_ERROR.search(str(error))
    if safetensors:
        return int(safetensors[1] or safetensors[2])
    if not isinstance(error, RuntimeError) or not any(message in str(error) for message in _TORCH_SAVE_ERRORS):
        return None
    inner: BaseException | None = error
    while inner := inner.__cause__ or inner.__context__:
        if isinstance(inner, OSError) and inner.errno:
            return inner.errno
    # torch.save to a path writes without Python, and its errors have no errno.
    return errno.ENOSPC if shutil.disk_usage(path.parent).free == 0 else None


def format_bytes(nbytes: float) -> str:
    """Returns a size as text, such as `1.5 GiB`."""
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        nbytes /= 1024
        if nbytes < 1024:
            return f"{nbytes:.1f} {unit}"
    return f"{nbytes / 1024:.1f} TiB"


def read_lines(path: Path, last: int | None = None) -> list[JsonObject]:
    """Returns the JSON objects of a file, one a line, or the ``last`` ones of them. A missing file has none.

    Incomplete lines are skipped: they are being written, or their writer was killed.
    """
    try:
        with open_file(path) as file:
            if last is not None:
                _seek_end(file, last)
            objects = [entry for line in _lines(file) if (entry := _parse(line)) is not None]
    except FileNotFoundError:
        return []
    if last is None:
        return objects
    return objects[-last:]


class LineFollower:
    """Reads the JSON objects of a growing file, one a line, each once; they may be those of an array, as in a trace."""

    _TAIL = 4096

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rewind()

    def was_cut(self) -> bool:
        """Whether what has been read is no longer there; `read` then begins again."""
        if not self._end:
            return False
        try:
            with open_file(self._path) as file:
                file.seek(self._end - len(self._tail))
                same = file.read(len(self._tail)) == self._tail
        except FileNotFoundError:
            same = False
        if not same:
            self.rewind()
        return not same

    def rewind(self) -> None:
        """Makes `read` begin again."""
        self._end = 0
        self._tail = b""

    def read(self) -> Iterator[tuple[int, JsonObject]]:
        """Yields the new objects, each with the byte at which its line begins."""
        try:
            file = open_file(self._path)
        except FileNotFoundError:
            return
        with file:
            file.seek(self._end)
            for line in _lines(file):
                if not line.endswith(b"\n"):
                    break
                start = self._end
                self._end = self._end + len(line)
                self._tail = line[-self._TAIL :]
                entry = _parse(line.lstrip(b"[,"))
                if entry is not None:
                    yield start, entry


def read_lines_at(path: Path, starts: Iterable[int]) -> list[JsonObject]:
    """Returns the JSON objects of the lines that begin at these bytes of a file."""
    with open_file(path) as file:
        entries = []
        for start in starts:
            file.seek(start)
            entries.append(_parse(file.readline()))
    return [entry for entry in entries if entry is not None]


def truncate_lines(path: Path, keep: Callable[[JsonObject], bool]) -> None:
    """Cuts a file of JSON lines before the first line that is incomplete or that `keep` rejects."""
    if not path.exists():
        return
    kept = 0
    with open_file(path) as file:
        for line in _lines(file):
            entry = _parse(line)
            if entry is None or not keep(entry):
                break
            kept += len(line)
    os.truncate(path, kept)
    sync(path)


def _lines(file: BufferedReader) -> Iterator[bytes]:
    """Yields the following lines of a file; raises OSError for one that no run has written."""
    while line := file.readline(_LONGEST_LINE + 1):
        if len(line) > _LONGEST_LINE:
            raise OSError(errno.EFBIG, f"a line has more than {format_bytes(_LONGEST_LINE)}", file.name)
        yield line


def _seek_end(file: BufferedReader, lines: int) -> None:
    """Seeks the beginning of the last complete lines of a file, or of the file if it has fewer."""
    start = file.seek(0, os.SEEK_END)
    ends = 0
    first = max(0, start - _LONGEST_LINE)
    while start > first:
        size = min(_BLOCK, start)
        start = file.seek(start - size)
        block = file.read(size)
        ends += block.count(b"\n")
        if ends > lines:
            file.seek(start + block.index(b"\n") + 1)
            return
    file.seek(start)


def _parse(line: bytes) -> JsonObject | None:
    if not line.endswith(b"\n"):
        return None
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None
