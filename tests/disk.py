"""A file system small enough to fill."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Self

import pytest


class SmallDisk:
    """A tmpfs at a path; the test is skipped where nothing may be mounted.

    Args:
        path: a directory to make.
    """

    def __init__(self, path: Path, kib: int) -> None:
        self.path = path
        path.mkdir()
        if os.geteuid() != 0 or self._mount(f"size={kib}k"):
            pytest.skip("file systems cannot be mounted here")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", str(self.path)], check=True)

    def resize(self, kib: int) -> None:
        assert not self._mount(f"remount,size={kib}k")

    def fill(self, left_kib: int) -> None:
        """Leaves this much space; others may write meanwhile."""
        with open(self.path / "filling", "wb") as file:
            for _ in range(10):
                left = os.statvfs(self.path)
                with suppress(OSError):
                    os.posix_fallocate(file.fileno(), 0, left.f_bavail * left.f_frsize - (left_kib << 10))
                    return
        raise AssertionError(f"{self.path} cannot be filled")

    def _mount(self, options: str) -> int:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.path)]
        return subprocess.run(command, check=False, capture_output=True).returncode
