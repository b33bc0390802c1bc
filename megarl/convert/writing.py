"""Writing an output from its parts: what holds already is kept, and it appears when all of it is there."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.convert.errors import BrokenError
from megarl.convert.parts import Part, Record
from megarl.convert.progress import Meter
from megarl.convert.running import run
from megarl.convert.staging import Staging

_FORMAT = 1
"""Of parts and records: what another version has begun is begun again."""


@dataclass(frozen=True, kw_only=True)
class _Write:
    """Writes a part; travels to the workers."""

    output: Path
    scratch_bytes: int

    def __call__(self, part: Part) -> Record:
        return part.write(self.output, self.scratch_bytes)


def write_parts(
    title: str,
    staging: Staging,
    parts: Sequence[Part],
    *,
    inputs: Iterable[Path],
    prepare: Callable[[Path], None],
    processes: int,
    scratch_bytes: int,
) -> Mapping[str, Record]:
    """Writes all parts into a staged output.

    Args:
        title: of what is done.
        staging: of the output.
        parts: to be written.
        inputs: the files that are read: the output follows from their names, sizes and times, and from the parts.
        prepare: makes the directories and files that parts are written into.
        processes: that write.
        scratch_bytes: of memory for reading, per process.

    Returns:
        The records by the names of the parts.

    Raises:
        BrokenError, UsageError: a source cannot be read or has changed meanwhile, or its values do not fit.
        WorkerError: a worker was killed; what is written is kept.
    """
    files = sorted(set(inputs))
    job = _job(parts, files)
    staging.begin(job, prepare)
    named = {part.name: part for part in parts}
    written = {
        record.part: record for record in staging.records() if record.part in named and record.holds(staging.output)
    }
    with Meter(title, sum(part.nbytes for part in parts)) as meter:
        meter.skip(sum(named[name].nbytes for name in written))
        left = [part for part in parts if part.name not in written]
        for part, record in run(left, _Write(output=staging.output, scratch_bytes=scratch_bytes), processes):
            staging.record(record)
            written[part.name] = record
            meter.advance(part.nbytes)
    if _job(parts, files) != job:
        raise BrokenError(f"{title} cannot be completed", ["files that it reads have changed meanwhile; run it again"])
    return written


def _job(parts: Sequence[Part], inputs: Sequence[Path]) -> str:
    """A digest of everything that an output follows from."""
    digest = hashlib.sha256(f"{_FORMAT}".encode())
    for path in inputs:
        stat = path.stat()
        digest.update(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    for part in parts:
        digest.update(f"{part.name} {part.archived} {part.blocks!r}\n".encode())
    return digest.hexdigest()
