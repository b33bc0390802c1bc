"""The display of a run, in a terminal and elsewhere."""

from __future__ import annotations

import io
import math
import re
import threading

from rich.console import Console

from megarl.run.display import Column, Display, metrics_table, short
from megarl.texts import counted

COLUMNS = {
    "objective/score": Column("score"),
    "objective/kl": Column("KL", "nats"),
    "policy/approxkl": Column("approx KL", "< 0.05"),
}


def terminal(width: int = 100) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=width, height=30, force_terminal=True, color_system=None), out


def lines(out: io.StringIO) -> list[str]:
    """Without the terminal's commands."""
    return re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", out.getvalue()).replace("\r", "\n").splitlines()


def test_a_terminal_shows_rows_above_a_bar_and_is_restored() -> None:
    threads = set(threading.enumerate())
    console, out = terminal()
    display = Display("PPO", COLUMNS, steps=20, done=15, console=console)
    display.phase("rollout")
    display._bar.refresh()
    assert "rollout" in out.getvalue()
    assert "15/20" in out.getvalue(), "of a resumed run"
    display.write(16, {"objective/score": 0.123456, "objective/kl": 0.5, "hidden": 7.0})
    display.write(17, {"objective/score": 0.25})
    rows = [line.split() for line in lines(out) if "/20" in line and "PPO" not in line]
    assert rows == [["16/20", "0.123", "0.5", "-"], ["17/20", "0.25", "-", "-"]]
    before = len(out.getvalue())
    display.close()
    last = out.getvalue()[before:]
    assert "PPO" in last
    assert "17/20" in last
    assert "rollout" not in last
    assert "hidden" not in out.getvalue()
    assert out.getvalue().endswith("\x1b[?25h"), "the cursor is still hidden"
    for thread in set(threading.enumerate()) - threads:
        thread.join(timeout=60)
        assert not thread.is_alive()


def test_another_width_has_other_columns_below_a_heading() -> None:
    console, out = terminal(width=40)
    columns = {f"m{i}": Column(f"m{i}") for i in range(9)}
    sink = Display("x", columns, steps=9, console=console)
    for step, width in enumerate((40, 40, 24, 4), start=1):
        console.width = width
        sink.write(step, {f"m{i}": float(i) for i in range(9)})
    sink.close()
    rows = [line.split() for line in lines(out) if line.strip()]
    headings = [["step", "m0", "m1", "m2"], ["step", "m0", "m1"], ["step", "m0"]]
    assert [row for row in rows if row[0] == "step"] == headings
    assert [len(row) - 1 for row in rows if row[0].endswith("/9")] == [3, 3, 2, 1]


def test_a_file_gets_plain_rows() -> None:
    out = io.StringIO()
    display = Display("PPO", COLUMNS, steps=12, console=Console(file=out, width=80))
    display.write(1, {"objective/score": 0.5, "policy/approxkl": 0.00123456})
    display.phase("rollout")
    display.write(2, {"objective/score": -1234.56, "objective/kl": 3.4e-7, "policy/approxkl": 0.0})
    display.close()
    assert out.getvalue().splitlines() == [
        "   step    score       KL approx KL",
        "                     nats    < 0.05",
        "   1/12      0.5        -   0.00123",
        "   2/12    -1235  3.4e-07         0",
    ]


def test_a_long_run_repeats_its_heading() -> None:
    out = io.StringIO()
    display = Display("PPO", COLUMNS, steps=100, console=Console(file=out, width=80))
    for step in range(1, 101):
        display.write(step, {"objective/score": 0.5})
    lines = out.getvalue().splitlines()
    assert [index for index, line in enumerate(lines) if "score" in line] == [0, 42, 84]


def test_numbers_are_short() -> None:
    assert [short(value) for value in (None, 7, 0.123456, 12345.6, 123456.7, 4.178e-7)] == [
        "-", "7", "0.1235", "12346", "123457", "4.178e-07"
    ]  # fmt: skip
    assert [counted(count, "step") for count in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]
    assert [counted(2, noun) for noun in ("mini-batch", "process")] == ["2 mini-batches", "2 processes"]


def test_intervals_are_beside_their_metrics() -> None:
    metrics = {
        "eval/score": 0.12345678,
        "eval/score_ci95": 0.01,
        "eval/samples": 64,
        "eval/exact": 1.0,
        "eval/exact_ci95": math.nan,
    }
    output = io.StringIO()
    Console(file=output, width=80).print(metrics_table(metrics))
    rows = [line.split() for line in output.getvalue().splitlines() if line.strip()]
    assert rows[0] == ["metric", "eval", "±", "95%"]
    assert rows[2:] == [["score", "0.1235", "0.01"], ["samples", "64"], ["exact", "1", "-"]]
