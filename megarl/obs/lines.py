"""Files of JSON lines, read while another process may be writing them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
