"""A program that measures the memory of a conversion: ``python -m tests.convert.remembering KIND SOURCE OUT``.

Prints the budget, which is the least that is accepted, and the peak of resident memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

from megarl.convert.exporting import compare, export_checkpoint
from megarl.convert.importing import import_checkpoint
from megarl.convert.resources import _LATER_BYTES, Resources, resident_bytes

FILE_BYTES = 16 << 20


def main(kind: str, source: str, out: str) -> None:
    budgets: list[int] = []

    def least(_: Resources, tasks: Sequence[int]) -> int:
        budgets.append(resident_bytes() + _LATER_BYTES + max(tasks))
        return 1

    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    resources = Resources(memory=1, processes=1)
    with patch.object(Resources, "workers", least):
        if kind == "import":
            import_checkpoint(Path(source), Path(out), resources=resources, max_file_bytes=FILE_BYTES)
        elif kind == "export":
            export_checkpoint(Path(source), Path(out), resources=resources, max_file_bytes=FILE_BYTES)
        else:
            compare(Path(source), Path(out), resources=resources)
    (peak,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(json.dumps([*budgets, int(peak.split()[1]) << 10]))


if __name__ == "__main__":
    main(*sys.argv[1:])
