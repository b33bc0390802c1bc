"""Checkpoints without a model: files of random bytes, as ranks would write them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from megarl.files import FileRecord
from megarl.run.directory import RunDirectory


def write_role(directory: Path, ranks: int, seed: int = 0, nbytes: int = 1000) -> list[list[FileRecord]]:
    """Writes two files per rank; returns the ranks' records of them."""
    directory.mkdir(parents=True)
    content = random.Random(seed)
    records: list[list[FileRecord]] = []
    for rank in range(ranks):
        files = [directory / f"{rank}-{index}.bin" for index in range(2)]
        for file in files:
            file.write_bytes(content.randbytes(nbytes))
        records.append([FileRecord.of(file, directory) for file in files])
    return records


def write_roles(
    staged: Path, roles: Sequence[str] = ("actor", "critic"), seed: int = 0
) -> dict[str, list[list[FileRecord]]]:
    """Some roles on two ranks each."""
    return {role: write_role(staged / role, 2, seed + index) for index, role in enumerate(roles)}


def save(directory: RunDirectory, step: int) -> None:
    """Commits a checkpoint of the roles."""
    directory.commit(step, write_roles(directory.checkpoints.stage(step)), {"version": step})


class Clock:
    """The time of day, which a test moves."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def content(directory: Path) -> dict[str, bytes]:
    """Every file below a directory."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}
