"""The sinks: what a reader of the file or the console gets."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import numpy as np
from rich.console import Console

from megarl.obs.metrics import ConsoleSink, JsonlSink


def test_every_step_is_a_flushed_line(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    with JsonlSink(path) as sink:
        sink.write(1, {"actor/loss": 0.5, "samples": 16})
        assert json.loads(path.read_text()) == {"step": 1, "actor/loss": 0.5, "samples": 16}
        sink.write(2, {"actor/loss": np.float32(0.25), "samples": np.int64(3)})
    assert json.loads(path.read_text().splitlines()[1]) == {"step": 2, "actor/loss": 0.25, "samples": 3}


def test_numbers_survive_to_the_last_bit(tmp_path: Path) -> None:
    value = math.pi * 1e-7
    with JsonlSink(tmp_path / "m") as sink:
        sink.write(1, {"x": value})
    assert json.loads((tmp_path / "m").read_text())["x"] == value


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    with JsonlSink(tmp_path / "m") as sink:
        sink.write(1, {"a": math.nan, "b": -math.inf, "c": 1.0})
    assert json.loads((tmp_path / "m").read_text()) == {"step": 1, "a": None, "b": None, "c": 1.0}


def test_a_new_sink_starts_the_file_anew(tmp_path: Path) -> None:
    for seed in (1, 2):
        with JsonlSink(tmp_path / "m") as sink:
            sink.write(seed, {})
    assert (tmp_path / "m").read_text() == '{"step": 2}\n'


def test_the_console_has_one_aligned_row_per_step() -> None:
    out = io.StringIO()
    sink = ConsoleSink({"actor/loss": "loss", "tokens": "tokens"}, steps=12, console=Console(file=out, width=40))
    sink.write(1, {"actor/loss": -0.123456, "tokens": 512, "hidden": 1.0})
    sink.write(12, {"actor/loss": math.nan})
    assert out.getvalue().splitlines() == [
        "      step       loss     tokens",
        "      1/12    -0.1235        512",
        "     12/12        nan          -",
    ]
