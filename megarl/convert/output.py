"""The output of a conversion: whole files, each written aside and renamed, in a directory that gets its name last."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

from megarl.convert.resources import Resources, run_tasks
from megarl.convert.stored import Assembly
from megarl.errors import UsageError
from megarl.files import format_bytes, read_json, sync, write_durably, write_errors
from megarl.run.paths import acquire_lock
from megarl.weights.hf_files import CheckpointError

_UNFINISHED = ".partial"


@dataclass(frozen=True, kw_only=True)
class OutputFile:
    """A file of the output, which one process makes.

    Args:
        header: bytes before the bare elements of a safetensors file; None: each tensor becomes a
            file of ``torch.save`` within the file.
    """

    path: str
    assembly: Assembly
    header: bytes | None

    def write(self, directory: Path) -> list[int]:
        """Writes the file durably under a temporary name and renames it.

        Returns the bytes before the first tensor, and at the end of each.
        """
        path = directory / self.path
        unfinished = path.with_name(f".{path.name}{_UNFINISHED}")
        tensors = self.assembly.read()
        with write_errors(unfinished, self.assembly.nbytes), open(unfinished, "wb") as file:
            file.write(self.header or b"")
            ends = [file.tell()]
            for name in self.assembly.tensors:
                values = tensors.pop(name)
                if self.header is None:
                    torch.save(values, file)
                else:
                    file.write(values.reshape(-1).view(torch.uint8).numpy().data)
                ends.append(file.tell())
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path)
        sync(path.parent)
        return ends


class PartialOutput:
    """The directory of an unfinished output, ``.NAME.partial`` beside it::

        manifest.json   settings, inputs and finished files
        output/         gets the output's name
        lock            held by the running conversion

    A conversion with the same settings and inputs keeps the finished files. One that ends before
    the manifest is written leaves nothing. The target must not exist.
    """

    def __init__(self, target: Path) -> None:
        if os.path.lexists(target):  # a link to nothing too, which no directory can replace
            raise UsageError(f"{target} exists; choose another --out, or remove it")
        self.target = target
        self.root = target.with_name(f".{target.name}{_UNFINISHED}")
        self.directory = self.root / "output"
        self.manifest = self.root / "manifest.json"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.root / "lock", "w")  # noqa: SIM115 (held until close)
            acquire_lock(self._lock)
            if os.fstat(self._lock.fileno()).st_nlink == 0:  # of one that has just ended, and removed it
                raise BlockingIOError
        except BlockingIOError:
            raise UsageError(f"{target} is being written by another process; wait for it") from None
        except OSError as error:
            raise UsageError(f"{target} cannot be written: {error.strerror}; choose another --out") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.manifest.is_file():
            shutil.rmtree(self.root, ignore_errors=True)
        self._lock.close()

    def write(
        self, title: str, files: Sequence[OutputFile], *, inputs: Iterable[Path], resources: Resources
    ) -> Mapping[str, list[int]]:
        """Writes the files that are not there yet; returns what ``OutputFile.write`` does, by the paths of all files.

        Raises:
            CheckpointError: an input cannot be read, or has changed meanwhile.
            UsageError: the unfinished output has other settings or inputs, or see
                ``Resources.workers``.
            RunError, OSError: a worker was killed, or a write failed; finished files are kept.
        """
        digest = hashlib.sha256()  # of everything that the bytes of the files depend on besides the inputs
        for file in files:
            content = file.path, file.header, file.assembly.tensors, file.assembly.copies
            digest.update(repr(content).encode())
        manifest: dict[str, Any] = {"inputs": _fingerprint(inputs), "settings": digest.hexdigest()}
        finished = self._finished(manifest)
        manifest["files"] = finished
        remaining = [file for file in files if file.path not in finished]
        workers = resources.workers([file.assembly.memory for file in remaining])
        for path in self.directory.rglob("*"):
            if path.is_file() and str(path.relative_to(self.directory)) not in finished:
                path.unlink()
        needed = sum(file.assembly.nbytes for file in remaining)
        with write_errors(self.root, needed):
            if needed > shutil.disk_usage(self.root).free:
                raise OSError(errno.ENOSPC, "too little")
        for file in files:
            (self.directory / file.path).parent.mkdir(parents=True, exist_ok=True)
        write_durably(self.manifest, json.dumps(manifest))
        done = f"{len(finished)} of {len(files)} files"
        print(f"{title}: {done} are finished; working processes: {workers}", file=sys.stderr, flush=True)
        work = partial(OutputFile.write, directory=self.directory)
        for file, ends in run_tasks(remaining, work, workers):
            finished[file.path] = ends
            write_durably(self.manifest, json.dumps(manifest))
            done = f"{len(finished)} of {len(files)} files"
            print(f"{title}: {done}; wrote {file.path}, {format_bytes(ends[-1])}", file=sys.stderr, flush=True)
        if _fingerprint(inputs) != manifest["inputs"]:
            self.manifest.unlink()
            raise CheckpointError(f"{title}: files that it reads have changed meanwhile; run it again")
        return finished

    def publish(self) -> None:
        """Makes the output durable and gives it its name."""
        for path in (*self.directory.rglob("*"), self.directory):
            sync(path)
        self.directory.rename(self.target)
        sync(self.target.parent)
        shutil.rmtree(self.root)

    def _finished(self, manifest: Mapping[str, Any]) -> dict[str, list[int]]:
        """Returns the files that are finished; raises UsageError where they are of another conversion."""
        if not self.manifest.is_file():
            return {}
        try:
            found: Mapping[str, Any] = read_json(self.manifest)
            files: dict[str, list[int]] = found["files"]
            other = [key for key in manifest if found[key] != manifest[key]]
        except (ValueError, TypeError, KeyError):
            raise UsageError(f"{self.manifest} is damaged; remove {self.root} to begin anew") from None
        if other:
            raise UsageError(
                f"{self.root} holds an unfinished conversion with other {' and '.join(other)}; "
                "repeat that one, choose another --out, or remove the directory"
            )
        finished: dict[str, list[int]] = {}
        for name, ends in files.items():
            path = self.directory / name
            if path.is_file() and path.stat().st_size == ends[-1]:
                finished[name] = ends
        return finished


def _fingerprint(inputs: Iterable[Path]) -> dict[str, list[int]]:
    """Returns size and time of change (nanoseconds) of each file, by its resolved path."""
    files: dict[str, list[int]] = {}
    for path in sorted(inputs):
        stat = path.stat()
        files[str(path.resolve())] = [stat.st_size, stat.st_mtime_ns]
    return files
