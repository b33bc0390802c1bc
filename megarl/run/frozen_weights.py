"""Digests of the weights of frozen roles and of those below adapters.

A resume loads them again from directories that may have changed.

The digests cover config.json and each safetensors file: all of a file up to 16 MiB; of a larger one
its size, its header and 256 blocks of 64 KiB at even distances, which is enough to notice one more
training step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from megarl.config import TrainingConfig
from megarl.types import RoleName
from megarl.weights.hf_files import INDEX_FILE, SINGLE_FILE, read_weight_map

FROZEN: Final = "frozen_weights"
"""Key of the digests in the driver's state of a checkpoint."""

FrozenDigests = Mapping[str, Mapping[str, str]]
"""Hexadecimal digests by the configuration's field of a directory and the name of a file in it."""

_BLOCK = 1 << 16
_BLOCKS = 256
_LENGTH_BYTES = 8  # a safetensors file starts with the length of its header
_READERS = 8


def digest_frozen_weights(config: TrainingConfig) -> FrozenDigests:
    """Returns the digests of all frozen roles of a run; raises OSError if a file cannot be read."""
    digests: dict[str, dict[str, str]] = {}
    with ThreadPoolExecutor(_READERS) as readers:
        for field, directory in _directories(config):
            digests[field] = _digests(directory, readers)
    return digests


def digest_model(directory: Path) -> str:
    """Returns a hexadecimal digest of the weights of a model; raises OSError if a file cannot be read."""
    with ThreadPoolExecutor(_READERS) as readers:
        files = _digests(directory, readers)
    return hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()


def changed_files(kept: FrozenDigests, now: FrozenDigests) -> dict[str, list[str]]:
    """Returns the names of the files that differ, by field; a field that one side lacks is not compared."""
    changed: dict[str, list[str]] = {}
    for field, files in kept.items():
        different = {name for name, _ in files.items() ^ now.get(field, files).items()}
        if different:
            changed[field] = sorted(different)
    return changed


def _directories(config: TrainingConfig) -> Iterator[tuple[str, Path]]:
    placed = set[RoleName]()
    for group in config.groups.values():
        placed.update(group.roles)
    adapted = {role for role in config.trained if config.lora(role) is not None}
    for role in sorted(placed.difference(config.saved) | (placed & adapted)):
        if role == "reference" and config.teachers:
            for teacher, path in config.teachers.items():
                yield f"reference.teachers.{teacher}", Path(path)
            continue
        checkpoint = config.role_checkpoint(role)
        if checkpoint is not None:
            yield f"{role}.path", Path(checkpoint)
        elif config.model.path is not None:
            yield "model.path", Path(config.model.path)


def _digests(directory: Path, readers: ThreadPoolExecutor) -> dict[str, str]:
    """Returns the digests of a model's files, by name."""
    files = _files(directory)
    return dict(zip([file.name for file in files], readers.map(_digest, files), strict=True))


def _files(directory: Path) -> list[Path]:
    index = directory / INDEX_FILE
    names = {SINGLE_FILE}
    if index.is_file():
        names = set(read_weight_map(index).values())
    files = [directory / name for name in ("config.json", *sorted(names))]
    return [file for file in files if file.exists()]  # a plan needs no weights


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    size = path.stat().st_size
    digest.update(str(size).encode())
    with path.open("rb") as file:
        if size <= _BLOCK * _BLOCKS:
            digest.update(file.read())
            return digest.hexdigest()
        length = file.read(_LENGTH_BYTES)
        digest.update(length + file.read(min(int.from_bytes(length, "little"), size)))
        for block in range(_BLOCKS):
            file.seek((size - _BLOCK) * block // (_BLOCKS - 1))
            digest.update(file.read(_BLOCK))
    return digest.hexdigest()
