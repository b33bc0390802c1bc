"""An output in the making: durable parts and the records of them, until one rename makes it appear."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self

from megarl.convert.errors import UsageError
from megarl.convert.parts import Record
from megarl.files import sync, write_durably

_JOB = "job"


class Staging:
    """Where an output is until it is complete: ``.NAME.partial`` beside it, with these in it::

        job        a digest of everything that the output follows from
        records/   what is written, a file per part
        output/    what will be renamed
        lock       held by the conversion that runs

    A conversion that was killed is continued by one of the same job: parts whose records still hold are kept. One that
    ended before its job began leaves nothing.

    Args:
        target: the output; must not exist.

    Raises:
        UsageError: it exists, it cannot be made, or another process makes it.
    """

    def __init__(self, target: Path) -> None:
        if os.path.lexists(target):  # a link to nothing too, which no directory can replace
            raise UsageError(f"{target} exists; choose another --out, or remove it")
        self.target = target
        self.root = target.with_name(f".{target.name}.partial")
        self.output, self._records = self.root / "output", self.root / "records"
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

    def begin(self, job: str, prepare: Callable[[Path], None]) -> None:
        """Keeps what an earlier conversion of the same job has written, and removes that of another.

        Args:
            job: a digest of everything that the output follows from.
            prepare: makes the directories and files that parts are written into. They are durable before the job is.
        """
        path = self.root / _JOB
        if path.is_file() and path.read_text() == job:
            return
        path.unlink(missing_ok=True)
        for directory in (self.output, self._records):
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
        prepare(self.output)
        self._sync_output()
        write_durably(path, job)

    def records(self) -> Iterable[Record]:
        """What was written before; whether it holds is not checked."""
        for path in sorted(self._records.glob("*.json")):
            try:
                fields: dict[str, Any] = json.loads(path.read_text())
                yield Record(**{**fields, "ends": tuple(fields["ends"])})
            except (ValueError, TypeError, KeyError):
                path.unlink()

    def record(self, record: Record) -> None:
        """Remembers a part that is written durably."""
        write_durably(self._records / f"{record.part}.json", json.dumps(dataclasses.asdict(record)))

    def publish(self) -> None:
        """Makes the output durable and gives it its name."""
        self._sync_output()
        self.output.rename(self.target)
        sync(self.target.parent)
        shutil.rmtree(self.root)

    def _sync_output(self) -> None:
        for path in (*self.output.rglob("*"), self.output):
            sync(path)
