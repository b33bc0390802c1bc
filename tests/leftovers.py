"""What a program has left behind: processes and shared memory, found without asking the program."""

from __future__ import annotations

import os
import secrets
import time
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

    def shared_memory(self, *, wait_s: float = 0.0) -> set[str]:
        """Shared memory files that were not there before; others on the machine may be short-lived."""
        deadline = time.monotonic() + wait_s
        while (new := set(os.listdir("/dev/shm")) - self._shared_memory) and time.monotonic() < deadline:
            time.sleep(0.1)
        return new
