"""Rows of the data that a run leaves out: named for its user, and counted."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megarl.config.schema import Fault
from megarl.data.sources import LeftOut, report


@dataclass(frozen=True, kw_only=True)
class LeftOutRows:
    """The rows that a run leaves out.

    Args:
        faults: of which there may be rows.
        rows: each with the field that names its source.
    """

    faults: frozenset[Fault] = frozenset()
    rows: Sequence[tuple[str, LeftOut]] = field(default_factory=tuple[tuple[str, LeftOut], ...])

    def metrics(self) -> dict[str, float]:
        """How many rows have each fault."""
        counts = Counter(row.fault for _, row in self.rows)
        return {f"data/dropped_{fault}": counts[fault] for fault in sorted(self.faults)}

    def write(self, path: Path) -> None:
        """A line of JSON for each row, with the field that names its source; no file without rows."""
        if self.rows:
            path.write_text("".join(json.dumps({"field": name, **asdict(row)}) + "\n" for name, row in self.rows))

    def told(self, path: Path) -> str:
        """What a user is told: how many rows are left out, the first of them, and where all are named."""
        lines = report([(row.where, row.reason) for _, row in self.rows])
        return "\n  ".join([f"{len(self.rows)} rows are left out; {path} names them:", *lines])
