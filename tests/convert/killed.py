"""A program: a conversion that kills itself after some parts: ``python -m tests.convert.killed``."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from megarl.convert.exporting import export_checkpoint
from megarl.convert.importing import import_checkpoint
from megarl.convert.resources import Resources
from megarl.convert.write_task import Staging

RESOURCES = Resources(memory=4 << 30, processes=1)
PART_BYTES = 4 << 10


def main(kind: str, source: str, out: str, parts: int) -> None:
    """Kills the process when it has recorded ``parts`` parts and has begun another file."""
    record, count = Staging.record, iter(range(parts))

    def last_record(staging: Staging, done: object) -> None:
        if next(count, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        record(staging, done)  # type: ignore[arg-type]

    Staging.record = last_record  # type: ignore[method-assign]
    convert = import_checkpoint if kind == "import" else export_checkpoint
    convert(Path(source), Path(out), resources=RESOURCES, max_task_bytes=PART_BYTES)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
