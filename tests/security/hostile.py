"""Seeded mutations of files that others may have written, and what a reader may do with them."""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3, 2**31, 2**63, 10**30, -(2**63), 0.5, 1e308, float("nan"), float("inf"), ""),
    *("x", "x" * 100_000, "../../outside", "/dev/zero", "\ud800", "\x00", "é\u202e", [], {}, [0], ["x"], [[]]),
    *([1] * 10_000, {"x": 1}, {"": {}}, [None], ["../../outside"], {"__class__": "os.system"}),
)
"""Wrong types, and numbers and texts at the edges of what types hold."""
_MOST_BYTES = 1 << 30
_CPU_S = 20.0


class HangError(BaseException):
    """A reader has computed for too long."""


def nested(chance: random.Random) -> str:
    """JSON that nests, from as deep as is accepted to deeper than any stack."""
    depth = chance.choice((50, 98, 150, 900, 1_100, 100_000))
    opening, closing = chance.choice((("[", "]"), ('{"a":', "}")))
    return opening * depth + "1" + closing * depth


def json_text(chance: random.Random, value: Any) -> bytes:
    """The JSON of a value after one to three mutations of it, of its text or of its bytes."""
    value = copy.deepcopy(value)
    for _ in range(chance.randint(1, 3)):
        _mutate(chance, value)
    text = json.dumps(value, ensure_ascii=chance.random() < 0.8)
    if chance.random() < 0.3:
        places = [index for index, letter in enumerate(text) if letter in ":,["]
        at = chance.choice(places) + 1 if places else 0
        more = chance.choice((nested(chance), "9" * 5_000, "1e999", "-Infinity", '"x": 1,', '"\\ud800"', "//", ","))
        text = text[:at] + more + (text[at:] if chance.random() < 0.5 else text[at:].partition(",")[2])
    if chance.random() < 0.1 and text.startswith("{"):
        text = text[:-1] + ", " + text[1:]  # every key twice
    data = text.encode("utf-8", "surrogatepass")
    kind = chance.random()
    if kind < 0.06:
        return data[: chance.randrange(len(data) + 1)]
    if kind < 0.12:
        return _flipped(chance, data)
    if kind < 0.15:
        return chance.choice((b"", b"null", b"[]", b"\xef\xbb\xbf" + data, text.encode("utf-16", "surrogatepass")))
    return data


def _mutate(chance: random.Random, value: Any) -> None:
    """Replaces, removes or adds an entry somewhere in a value."""
    owners = [owner for owner in _containers(value) if owner]
    if not owners:
        return
    owner = chance.choice(owners)
    key = chance.choice(list(owner) if isinstance(owner, dict) else range(len(owner)))
    action = chance.random()
    if action < 0.75:
        owner[key] = copy.deepcopy(chance.choice(VALUES))
    elif action < 0.9:
        del owner[key]
    elif isinstance(owner, dict):
        owner[chance.choice(("x", "", "../../outside", "__class__"))] = copy.deepcopy(chance.choice(VALUES))
    else:
        owner.append(copy.deepcopy(owner[key]))


def _containers(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        yield value
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _containers(inner)


def _flipped(chance: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.randint(1, 8)):
        if changed:
            changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)


def safetensors(chance: random.Random, data: bytes) -> bytes:
    """A safetensors file with another header, another length of it, or other data."""
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    kind = chance.random()
    if kind < 0.15:
        return data[: chance.randrange(len(data))]
    if kind < 0.3:
        wrong = chance.choice((0, 1, length - 1, length + 1, len(data), 2**31, 2**63, 2**64 - 1))
        return wrong.to_bytes(8, "little") + data[8:]
    if kind < 0.4:
        return data[:8] + _flipped(chance, data[8 : 8 + length]) + body
    name = chance.choice([name for name in header if name != "__metadata__"])
    entry = header[name]
    start, stop = entry["data_offsets"]
    if kind < 0.6:
        offsets = [[stop, start], [0, stop - start], [start, 2**63], [-1, stop]]
        offsets += [[start + 1, stop + 1], [start], [1e3, 2]]
        entry["data_offsets"] = chance.choice(offsets)
    elif kind < 0.8:
        entry["shape"] = chance.choice(([-1, -4], [2**62, 4], [0], [], [2**32, 2**32], entry["shape"][::-1], ["4"], 3))
    elif kind < 0.85:
        entry["dtype"] = chance.choice(("F64", "Q8", "BOOL", "F8_E4M3", "", None, 3))
    text = json_text(chance, header) if kind >= 0.85 else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def misplaced(chance: random.Random, path: Path) -> None:
    """Puts something other than a regular file at a path."""
    match chance.randrange(6):
        case 0:
            path.symlink_to(path.name)
        case 1:
            path.symlink_to("/dev/zero")
        case 2:
            path.symlink_to("../../../outside")
        case 3:
            os.mkfifo(path)
        case 4:
            path.mkdir()
        case _:
            pass  # it is missing


_writes: list[str] | None = None


def _note_write(event: str, args: tuple[Any, ...]) -> None:
    if _writes is not None and event == "open" and isinstance(args[0], str | bytes):
        flags = args[2] if isinstance(args[2], int) else 0
        path = os.fsdecode(args[0])
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and "__pycache__" not in path and path != os.devnull:
            _writes.append(path)
    elif _writes is not None and event in ("os.rename", "os.remove", "os.mkdir", "os.symlink", "shutil.rmtree"):
        _writes.append(f"{event}{args}")


sys.addaudithook(_note_write)


@contextmanager
def confined() -> Iterator[list[str]]:
    """Raises MemoryError for gigabytes, and HangError for a long computation; yields what the block writes."""
    global _writes

    def hang(*_: object) -> None:
        raise HangError

    status = Path("/proc/self/statm").read_text().split()
    used, (_, hard) = int(status[0]) * resource.getpagesize(), resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGPROF, hang)
    resource.setrlimit(resource.RLIMIT_AS, (used + _MOST_BYTES, hard))
    signal.setitimer(signal.ITIMER_PROF, _CPU_S)
    _writes = []
    try:
        yield _writes
    finally:
        _writes = None
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        signal.signal(signal.SIGPROF, before)


def read(call: Callable[[], object], error: type[Exception]) -> str | None:
    """Calls a reader, which may raise `error` alone and write nothing; returns the message, None if it accepts."""
    with confined() as writes:
        try:
            call()
        except error as refused:
            message = str(refused)
        else:
            message = None
    assert not writes, writes
    if message is not None:
        assert "Traceback" not in message, message[:3000]
        assert len(message) < 20_000, message[:3000]
    return message
