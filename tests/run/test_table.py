"""Metrics as a table on the console."""

from __future__ import annotations

import io
import math

from rich.console import Console

from megarl.run.display import metrics_table


def test_intervals_are_beside_their_metrics_and_prefixes_are_columns() -> None:
    metrics = {
        "eval/score": 0.12345678,
        "eval/score_ci95": 0.01,
        "eval/samples": 64,
        "eval/exact": 1.0,
        "eval/exact_ci95": math.nan,
        "eval_ema/score": -2.0,
        "eval_ema/score_ci95": 0.5,
    }
    output = io.StringIO()
    Console(file=output, width=80).print(metrics_table(metrics))
    lines = [line.split() for line in output.getvalue().splitlines() if line.strip()]
    assert lines[0] == ["metric", "eval", "±", "95%", "eval_ema", "±", "95%"]
    assert lines[2:] == [
        ["score", "0.1235", "0.01", "-2", "0.5"],
        ["samples", "64", "-"],
        ["exact", "1", "-", "-"],
    ]
