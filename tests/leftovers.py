"""What a program has left behind: processes and shared memory, found without asking the program."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


class Trace:
    """Finds what belongs to a program by an environment variable that everything it starts inherits."""

    def __init__(self) -> None:
        self._value = secrets.token_hex(8)
        self._shared_memory = set(os.listdir("/dev/shm"))

    def environment(self) -> dict[str, str]:
        """The environment in which to start the program."""
        return {**os.environ, "MEGARL_TEST_TRACE": self._value}

    def processes(self) -> list[str]:
        """Command lines of the program's living processes."""
        living: list[str] = []
        for directory in Path("/proc").iterdir():
            try:
                if self._value.encode() in (directory / "environ").read_bytes():
                    living.append((directory / "cmdline").read_text().replace("\0", " ")[:120])
            except OSError:
                continue
        return [line for line in living if line]

    def shared_memory(self) -> set[str]:
        """Shared memory files that were not there before and that no living process uses: nobody will remove them."""
        return set(os.listdir("/dev/shm")) - self._shared_memory - _in_use()


def _in_use() -> set[str]:
    """Names of the shared memory files that living processes have mapped."""
    names: set[str] = set()
    for directory in Path("/proc").iterdir():
        try:
            maps = (directory / "maps").read_text()
        except OSError:
            continue
        names.update(line.rpartition("/")[2] for line in maps.splitlines() if " /dev/shm/" in line)
    return names
