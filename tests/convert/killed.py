"""A program: a conversion that is killed while it writes a file: ``python -m tests.convert.killed``."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from megarl.convert.exporting import export_checkpoint
from megarl.convert.importing import import_checkpoint
from megarl.convert.output import OutputFile

FILE_BYTES = 4 << 10


def main(kind: str, source: str, out: str, files: int) -> None:
    """Kills the process when it has finished ``files`` files and has written a part of the next one."""
    write = OutputFile.write
    begun: list[str] = []

    def write_or_die(file: OutputFile, directory: Path) -> list[int]:
        begun.append(file.path)
        if len(begun) > files:
            os.fsync = _cut_and_die
        return write(file, directory)

    OutputFile.write = write_or_die  # type: ignore[method-assign]
    convert = import_checkpoint if kind == "import" else export_checkpoint
    convert(Path(source), Path(out), max_file_bytes=FILE_BYTES)


def _cut_and_die(descriptor: int) -> None:
    os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
