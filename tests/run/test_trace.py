"""The trace of a run, read back as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.cluster.spans import WAIT, Span
from megarl.run.attempts import Attempt
from megarl.run.trace import Trace
from tests.run.staging import Clock

ATTEMPTS = [Attempt(number=number, time=1000.0 * number, step=0, host="n1", pid=7) for number in (1, 2)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    clock.now += 0.5
    monkeypatch.setattr("time.time", clock)
    return clock


def take_step(trace: Trace, clock: Clock, step: int) -> None:
    """A step of 3 s: 1 s of sampling, 2 s of updating, of which a rank waits half a second."""
    trace.begin(step)
    clock.now += 0.00005
    trace.phase("rollout")
    clock.now += 1.0
    trace.phase("update")
    start = clock.now
    clock.now += 2.0
    spans = [
        Span(name=WAIT, start=start, end=start + 0.5),
        Span(name="update", start=start + 0.5, end=clock.now),
    ]
    trace.ran("train rank 0", "actor", spans)
    trace.end({"rollout/queue_depth": 1, "objective/score": 0.5})


def read(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())


def spans_of(events: list[dict[str, Any]]) -> list[tuple[int, str, str, float, float]]:
    """Attempt, row, name, and the times in seconds of all spans."""
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    return [
        (e["pid"], rows[e["pid"], e["tid"]], e["name"], round(e["ts"] / 1e6, 3), round(e["dur"] / 1e6, 3))
        for e in events
        if e["ph"] == "X"
    ]


def test_every_process_has_a_row_with_its_spans(tmp_path: Path, clock: Clock) -> None:
    trace = Trace(tmp_path / "trace.json", ATTEMPTS[:1])
    clock.now += 4.0
    take_step(trace, clock, 1)
    trace.close()
    events = read(tmp_path / "trace.json")
    assert spans_of(events) == [
        (1, "driver", "start", 0.5, 4.0),
        (1, "driver", "rollout", 4.5, 1.0),
        (1, "train rank 0", "wait", 5.5, 0.5),
        (1, "train rank 0", "actor.update", 6.0, 1.5),
        (1, "driver", "update", 5.5, 2.0),
        (1, "driver", "step 1", 4.5, 3.0),
    ]
    assert [e["args"]["step"] for e in events if e["ph"] == "X"] == [0, 1, 1, 1, 1, 1]
    assert [(e["name"], e["args"]["value"]) for e in events if e["ph"] == "C"] == [("rollout/queue_depth", 1)]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["attempt 1"]


@pytest.mark.parametrize("end", ["]\n", "", ',{"ph":"X","pid":1,"ti'], ids=["closed", "killed", "killed in a line"])
def test_a_resumed_run_appends_an_attempt(tmp_path: Path, clock: Clock, end: str) -> None:
    path = tmp_path / "trace.json"
    first = Trace(path, ATTEMPTS[:1])
    take_step(first, clock, 1)
    first.close()
    path.write_text(path.read_text().removesuffix("]\n") + end)
    clock.now = 2000.0
    second = Trace(path, ATTEMPTS)
    take_step(second, clock, 1)
    second.close()
    steps = [span for span in spans_of(read(path)) if span[2] == "step 1"]
    assert steps == [(1, "driver", "step 1", 0.5, 3.0), (2, "driver", "step 1", 1000.0, 3.0)]


def test_an_empty_or_truncated_file_starts_over(tmp_path: Path) -> None:
    for text in ("", '[{"ph":'):
        path = tmp_path / "trace.json"
        path.write_text(text)
        Trace(path, ATTEMPTS).close()
        assert [event["name"] for event in read(path)][:2] == ["process_name", "thread_name"]


def test_a_full_file_is_rotated(tmp_path: Path, clock: Clock) -> None:
    trace = Trace(tmp_path / "trace.json", ATTEMPTS[:1], limit=5000)
    for step in range(1, 41):
        take_step(trace, clock, step)
    trace.close()
    files = [tmp_path / "trace.1.json", tmp_path / "trace.json"]
    assert sorted(tmp_path.iterdir()) == sorted(files)
    assert all(file.stat().st_size < 6500 for file in files)
    spans = [spans_of(read(file)) for file in files]
    steps = [int(name.split()[1]) for events in spans for _, _, name, _, _ in events if name.startswith("step")]
    assert steps == list(range(steps[0], 41))
    assert len(steps) > 7
    assert {row for _, row, *_ in spans[1]} == {"driver", "train rank 0"}
