"""A program that measures the memory of a conversion: ``python -m tests.convert.remembering KIND SOURCE OUT``.

Prints the budget, which is ``BUDGET_BYTES`` beyond what Python and its libraries take, and the peak of resident memory.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from megarl.convert.exporting import export_checkpoint
from megarl.convert.importing import import_checkpoint
from megarl.convert.resources import Resources, resident_bytes
from megarl.convert.verifying import compare

BUDGET_BYTES = 28 << 20


def main(kind: str, source: str, out: str) -> None:
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    budget = resident_bytes() + BUDGET_BYTES
    work = {"import": import_checkpoint, "export": export_checkpoint, "verify": compare}[kind]
    work(Path(source), Path(out), resources=Resources(memory=budget, processes=1))
    (peak,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(json.dumps([budget, int(peak.split()[1]) << 10]))


if __name__ == "__main__":
    main(*sys.argv[1:])
