"""Skipped rows of a run, against its input."""

from __future__ import annotations

import json
from pathlib import Path

from megarl.data.sources import LeftOut, LeftOutRows

ROWS = [
    ("data.train", LeftOut(where="pairs.jsonl, line 3", fault="equal", reason="the same")),
    ("data.train", LeftOut(where="pairs.jsonl, line 5", fault="too_long", reason="90 tokens are too many")),
    ("data.evaluation", LeftOut(where="held_out.jsonl, line 1", fault="equal", reason="the same")),
]


def test_skipped_rows_are_counted_by_fault_and_named(tmp_path: Path) -> None:
    left_out = LeftOutRows(faults=frozenset({"equal", "empty", "too_long"}), rows=ROWS)
    assert left_out.metrics() == {"data/dropped_empty": 0, "data/dropped_equal": 2, "data/dropped_too_long": 1}
    file = tmp_path / "left_out.jsonl"
    left_out.write(file)
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        {"field": field, "where": row.where, "fault": row.fault, "reason": row.reason} for field, row in ROWS
    ]
    assert left_out.message(file).splitlines() == [
        f"3 rows are left out; {file} names them:",
        "  pairs.jsonl, line 3 (and 1 more): the same",
        "  pairs.jsonl, line 5: 90 tokens are too many",
    ]
    LeftOutRows(faults=frozenset({"too_long"})).write(tmp_path / "empty.jsonl")
    assert not (tmp_path / "empty.jsonl").exists()
