"""Output of the file sinks."""

from __future__ import annotations

import json
import math
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from megarl.run.sinks import JsonlSink, ServiceSink


def test_every_step_is_a_flushed_line_of_exact_numbers_or_null(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    value = math.pi * 1e-7
    with closing(JsonlSink(path, clock=lambda: 1700000000.25)) as sink:
        sink.write(1, {"actor/loss": 0.5, "samples": 16})
        assert path.read_text() == '{"step": 1, "actor/loss": 0.5, "samples": 16, "time/written": 1700000000.25}\n'
    with closing(JsonlSink(path, clock=lambda: 7.0)) as sink:  # a resumed run appends
        sink.write(2, {"a": math.nan, "b": -math.inf, "c": value, "d": np.float32("nan")})
        sink.write(3, {"a": np.float32(0.25), "b": np.int64(3)})
    _, second, third = map(json.loads, path.read_text().splitlines())
    assert second == {"step": 2, "a": None, "b": None, "c": value, "d": None, "time/written": 7.0}
    assert third == {"step": 3, "a": 0.25, "b": 3, "time/written": 7.0}


def test_objects_may_be_nested_and_text_stays_readable(tmp_path: Path) -> None:
    with closing(JsonlSink(tmp_path / "m", clock=None)) as lines:
        lines.write(1, {"text": "für\n", "scores": {"rule": np.float32(0.5)}, "ids": (np.int32(1), 2)})
        lines.write(2, {"done": True, "no": None})
    first, second = (tmp_path / "m").read_text(encoding="utf-8").splitlines()
    assert first == '{"step": 1, "text": "für\\n", "scores": {"rule": 0.5}, "ids": [1, 2]}'
    assert second == '{"step": 2, "done": true, "no": null}'


def test_a_service_that_is_down_ends_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: object) -> None:
        raise ConnectionError("no route")

    sink = ServiceSink("wandb", fail, fail)
    sink.write(3, {"a": 1.0})
    sink.close()
    assert capsys.readouterr().err.splitlines() == [
        "wandb cannot write step 3: no route",
        "wandb cannot close: no route",
    ]
