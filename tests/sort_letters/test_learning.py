"""The learning benchmark: its configurations, and the table that it makes of results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.learning import cells, page
from benchmarks.learning.cells import CELLS, ROWS, Cell, Row
from benchmarks.learning.page import Results, learns, report, table
from megarl.config import ConfigError, load
from megarl.config.problems import Problem


def result(start: float, end: float, kl: list[float] | None = None) -> dict[str, Any]:
    evaluations = [
        {"step": step, "samples": 1024, "true_score": score, "half_width": 0.03, "reward_model_score": 0.0}
        for step, score in ((0, start), (30, end))
    ]
    return {"evaluations": evaluations, "steps": 30, "samples": 3840, "kl": kl or [], "seed": 0}


def problems(cell: Cell) -> Sequence[Problem]:
    try:
        load(cell.config, cell.overrides)
    except ConfigError as error:
        return error.problems
    return ()


@pytest.mark.parametrize(("algorithm", "staleness"), ROWS)
def test_configurations_are_valid_except_for_models_and_data_made_later(algorithm: str, staleness: int | None) -> None:
    cell = Cell(algorithm=algorithm, seed=0, staleness=staleness)
    assert all("runs/learning/" in problem.value for problem in problems(cell))


def test_the_planned_runs_are_all_seeds_algorithms_controls_and_staleness_settings() -> None:
    assert len(CELLS) == len({cell.result for cell in CELLS}) == 3 * (8 + 1 + 2 * 5 + 2 + 5 + 2 + 5 + 3 + 4)
    assert [cell.seed for cell in CELLS[:40]] == [0] * 40


def test_a_row_by_hand() -> None:
    row = "| GRPO | 2 | 30 | 3,840 | 0.350 | 0.750 | +0.400 | 0.100 | 1.50 | open |"
    results: dict[Row, Results] = {("grpo", None): [result(0.3, 0.8, [0.0, 1.0]), result(0.4, 0.7, [0.0, 2.0])]}
    assert table(results, ["grpo"]).splitlines()[2:] == [row], "a seed is missing"
    results_of_all: dict[Row, Results] = {("grpo", None): [result(0.3, 0.8)] * 3}
    assert table(results_of_all, ["grpo"]).splitlines()[-1].endswith("| - | yes |")
    assert len(table(results, ["ppo"]).splitlines()) == 2


@pytest.mark.parametrize(
    ("ends", "learned"),
    [
        ([0.8, 0.85, 0.9], True),
        ([0.35, 0.36, 0.34], False),  # within the error of an evaluation
        ([0.29, 0.9, 0.9], False),  # one seed lost
        ([0.31, 0.9, 0.4], False),  # the seeds differ more than they gain
    ],
)
def test_learning_is_a_gain_beyond_spread_and_error(ends: list[float], learned: bool) -> None:
    assert learns([result(0.3, end) for end in ends]) == learned


def test_the_page_lists_missing_results_failed_learning_and_findings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(page, "PAGE", tmp_path / "page")
    monkeypatch.setattr(page, "PICTURE", tmp_path / "picture")
    (tmp_path / "results").mkdir()
    for algorithm, staleness, end in (
        ("ppo", None, 0.8),
        ("raft", None, 0.31),
        ("control", None, 0.3),
        ("decoupled_ppo", 4, 0.7),
        ("lookup", None, 0.9),
        ("lookup_control", None, 0.2),
    ):
        for seed in (0, 1, 2):
            cell = Cell(algorithm=algorithm, seed=seed, staleness=staleness)
            own = {"algorithm": algorithm, "seed": seed, "settings": cell.settings(), "last_invocation_seconds": 90}
            finding = {"metric": "truncated_fraction", "first": 7, "last": None, "text": "cut off"}
            found = {"ppo": [], "raft": [finding], "control": [finding]}
            kept = {"findings": found[algorithm]} if algorithm in found and seed == 1 else {}
            cell.result.write_text(json.dumps({**result(0.3, end), **own, **kept}))
    stale = Cell(algorithm="grpo", seed=0)
    stale.result.write_text(json.dumps({**result(0.3, 0.9), "settings": "of another file"}))
    monkeypatch.setattr(page, "draw", lambda _: None)
    report()
    written = (tmp_path / "page").read_text()
    assert "Not beyond the margin: RAFT.\n" in written
    assert "| GRPO over several turns | 3 |" in written.split("## In conversations")[1]
    assert "| GRPO over several turns | 2 | 0.300 ± 0.030 | 0.900 ± 0.030 | 90 |" in written
    tables = written.split("## On samples of older weights")
    assert "| PPO | 3 |" in tables[0]
    assert "| decoupled PPO, 4 old | 3 |" in tables[1]
    missing = written.split("\nNot run yet: ")[1]
    assert {"`grpo-0`", "`coupled_ppo-s8-2`"} < set(missing.removesuffix(".\n").split(", "))
    checks = "the [health checks](metrics.md#health-checks)"
    found = f"In the 2 runs, controls apart, whose findings were kept, {checks} found:\n\n"
    assert f"\n{found}- `raft-1`, step 7: cut off\n\nNot run yet" in written
