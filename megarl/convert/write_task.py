"""Writes an output by tasks: durable and resumable parts, until one rename makes the output appear."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Self

import torch
import xxhash

from megarl.convert.blocks import Block
from megarl.convert.resources import Resources
from megarl.convert.stored import BoxReader, Stored, as_bytes
from megarl.errors import UsageError
from megarl.files import sync, write_durably, write_errors
from megarl.weights.hf_files import CheckpointError

_TASK_BYTES = 256 << 20
_MAX_TASKS = 1024
_READ_BYTES = 1 << 20
_JOB = "job"
_FORMAT = 2
"""Of tasks and records; an output that another version began starts anew."""


@dataclass(frozen=True, kw_only=True)
class WriteTask:
    """Blocks that one process reads and writes to a file, one after the other.

    Args:
        file: relative to the output.
        start: of the first block in the file, in bytes.
        archived: each block becomes an archive of ``torch.save`` within the file; otherwise bare elements.
        sources: of the blocks' copies.
    """

    file: str
    start: int
    archived: bool
    blocks: tuple[Block, ...]
    sources: Mapping[str, Stored]

    @property
    def name(self) -> str:
        """Returns a name that is unique among the tasks of an output."""
        return f"{self.file.replace('/', '.')}.{self.start}"

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    def write(self, output: Path, scratch_bytes: int) -> WriteRecord:
        """Writes the blocks durably. A file of several tasks must exist."""
        path = output / self.file
        with (
            write_errors(path, self.nbytes),
            BoxReader(scratch_bytes) as reader,
            open(path, "wb" if self.archived else "r+b") as file,
        ):
            file.seek(self.start)
            stream = _DigestWriter(file)
            ends = [0]
            archive: Any = stream
            for block in self.blocks:
                values = block.read(self.sources, reader)
                torch.save(values, archive) if self.archived else stream.write(as_bytes(values))
                ends.append(stream.nbytes)
                del values  # before the next block has memory
            file.flush()
            os.fsync(file.fileno())
        digest = stream.hasher.hexdigest()
        return WriteRecord(task=self.name, file=self.file, start=self.start, ends=tuple(ends), digest=digest)


@dataclass(frozen=True, kw_only=True)
class WriteRecord:
    """What a task has written.

    Args:
        task: its name.
        ends: 0, and the end of each block, in bytes from ``start``.
        digest: of the bytes (XXH3, 128 bits).
    """

    task: str
    file: str
    start: int
    ends: tuple[int, ...]
    digest: str

    def holds(self, output: Path) -> bool:
        """Returns whether the file has these bytes."""
        hasher = xxhash.xxh3_128()
        left = self.ends[-1]
        try:
            with open(output / self.file, "rb") as file:
                file.seek(self.start)
                while left and (data := file.read(min(left, _READ_BYTES))):
                    hasher.update(data)
                    left -= len(data)
        except OSError:
            return False
        return not left and hasher.hexdigest() == self.digest


class _DigestWriter:
    """Writes to a file from its current position, and computes a digest of the bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.hasher = xxhash.xxh3_128()
        self.nbytes = 0

    def write(self, data: Any) -> int:
        self.hasher.update(data)
        self._file.write(data)
        self.nbytes += len(data)
        return len(data)

    def flush(self) -> None:
        """Called by ``torch.save``; the file itself is flushed once."""


class Staging:
    """The directory of an incomplete output, ``.NAME.partial`` beside it::

        job        a digest of everything that the output depends on
        records/   a file per task that is done
        output/    gets the output's name
        lock       held by the running conversion

    After a kill, a conversion with the same job continues and keeps the parts that agree with their records. One that
    ended before its job was written leaves nothing. The target must not exist.
    """

    def __init__(self, target: Path) -> None:
        if os.path.lexists(target):  # a link to nothing too, which no directory can replace
            raise UsageError(f"{target} exists; choose another --out, or remove it")
        self.target = target
        self.root = target.with_name(f".{target.name}.partial")
        self.output = self.root / "output"
        self._records = self.root / "records"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.root / "lock", "w")  # noqa: SIM115 (held until close)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(self._lock.fileno()).st_nlink == 0:  # of one that has just ended, and removed it
                raise BlockingIOError
        except BlockingIOError:
            raise UsageError(f"{target} is being written by another process; wait for it") from None
        except OSError as error:
            raise UsageError(f"{target} cannot be written: {error.strerror}; choose another --out") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not (self.root / _JOB).is_file():
            shutil.rmtree(self.root, ignore_errors=True)
        self._lock.close()

    def write(
        self,
        title: str,
        tasks: Sequence[WriteTask],
        *,
        inputs: Iterable[Path],
        prepare: Callable[[Path], None],
        resources: Resources,
        scratch_bytes: int,
    ) -> Mapping[str, WriteRecord]:
        """Runs the tasks whose bytes are not there yet; returns the records by the names of the tasks.

        Args:
            inputs: the files that are read; the output depends on their names, sizes and times, and on the tasks.
            prepare: makes the directories and files that tasks write into.
            scratch_bytes: of memory for reading, per process.

        Raises:
            CheckpointError, UsageError: a source cannot be read or has changed meanwhile, or its values do not fit.
            RunError, OSError: a worker was killed, or a write failed; written parts are kept.
        """
        files = sorted(set(inputs))
        job = _job_digest(tasks, files)
        self._begin(job, prepare)
        names = {task.name for task in tasks}
        done = {record.task: record for record in self._read_records() if record.task in names}
        done = {name: record for name, record in done.items() if record.holds(self.output)}
        left = [task for task in tasks if task.name not in done]
        done_bytes = sum(task.nbytes for task in tasks if task.name in done)
        work = partial(WriteTask.write, output=self.output, scratch_bytes=scratch_bytes)
        for task, record in resources.run(title, left, work, done_bytes):
            self.record(record)
            done[task.name] = record
        if _job_digest(tasks, files) != job:
            problem = "files that it reads have changed meanwhile; run it again"
            raise CheckpointError(f"{title} cannot be completed", [problem])
        return done

    def record(self, record: WriteRecord) -> None:
        """Records a task whose bytes are durable."""
        write_durably(self._records / f"{record.task}.json", json.dumps(dataclasses.asdict(record)))

    def publish(self) -> None:
        """Makes the output durable and gives it its name."""
        self._sync_output()
        self.output.rename(self.target)
        sync(self.target.parent)
        shutil.rmtree(self.root)

    def _begin(self, job: str, prepare: Callable[[Path], None]) -> None:
        """Keeps the parts of an earlier conversion with the same job, and removes those of another."""
        path = self.root / _JOB
        if path.is_file() and path.read_text() == job:
            return
        path.unlink(missing_ok=True)
        for directory in (self.output, self._records):
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
        prepare(self.output)
        self._sync_output()  # before the job is there
        write_durably(path, job)

    def _read_records(self) -> Iterator[WriteRecord]:
        for path in sorted(self._records.glob("*.json")):
            try:
                fields: dict[str, Any] = json.loads(path.read_text())
                yield WriteRecord(**{**fields, "ends": tuple(fields["ends"])})
            except (ValueError, TypeError, KeyError):
                path.unlink()

    def _sync_output(self) -> None:
        for path in (*self.output.rglob("*"), self.output):
            sync(path)


def task_bytes(total: int) -> int:
    """Returns the size of the tasks of an output: at least 256 MiB, and at most 1,024 tasks."""
    return max(_TASK_BYTES, -(-total // _MAX_TASKS))


def _job_digest(tasks: Sequence[WriteTask], inputs: Sequence[Path]) -> str:
    digest = hashlib.sha256(f"{_FORMAT}".encode())
    for path in inputs:
        stat = path.stat()
        digest.update(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    for task in tasks:
        digest.update(f"{task.name} {task.archived} {task.blocks!r}\n".encode())
    return digest.hexdigest()
