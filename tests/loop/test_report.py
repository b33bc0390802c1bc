"""What a run writes, read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.config import load
from megarl.loop.directory import RunDirectory
from megarl.loop.report import Reporter
from megarl.loop.stage import EvaluationResult, StepResult
from megarl.obs.samples import ShownSample
from tests.loop.test_assets import DEBUG

SAMPLE = ShownSample(
    sample_id="1/p/0", prompt_id="p", prompt="2+2", response="4", finished=True, score=1.0, scores={"exact": 1.0}
)
RESULT = StepResult(
    step=1,
    metrics={"objective/score": 0.5},
    updates=[{"policy/loss": 1.0, "value/loss": -1.0}, {"policy/loss": 2.0, "value/loss": 3.0}],
    samples=[SAMPLE],
)
EVALUATION = EvaluationResult(step=1, metrics={"eval/exact": 0.25, "eval/exact_ci95": 0.1}, samples=[SAMPLE])


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_metrics_of_updates_are_means_over_those_that_have_them() -> None:
    result = StepResult(step=1, metrics={"version": 1}, updates=[{"a": 1.0, "b": 4.0}, {"a": 3.0}])
    assert result.all_metrics() == {"version": 1, "a": 2.0, "b": 4.0}


def test_extremes_of_updates_are_the_largest_and_the_smallest() -> None:
    updates = [{"ratio_max": 1.5, "ratio_min": 0.5}, {"ratio_max": 1.0, "ratio_min": 0.25}]
    assert StepResult(step=1, metrics={}, updates=updates).all_metrics() == {"ratio_max": 1.5, "ratio_min": 0.25}


def test_every_file_has_its_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load(DEBUG, [f"run.dir={tmp_path}", "run.steps=1"])
    directory = RunDirectory(config)
    with Reporter(config, directory, taken=0) as reporter:
        reporter.started(3.0, {"sync/logprob_mean_abs_diff": 1e-6})
        reporter.write(RESULT)
        reporter.evaluated(EVALUATION)
        reporter.evaluated(None)
        reporter.finished({"normalisation/mean": 0.5}, 12.3)
    printed = capsys.readouterr().out
    assert "started in 3 s" in printed
    assert "evaluation after step 1" in printed
    assert ["exact", "0.25", "0.1"] in [line.split() for line in printed.splitlines()]
    assert "1 steps in 12 s" in printed
    assert lines(directory.metrics) == [{"step": 1, "objective/score": 0.5, "policy/loss": 1.5, "value/loss": 1.0}]
    assert lines(directory.updates) == [
        {"step": 1, "update": 1, "policy/loss": 1.0, "value/loss": -1.0},
        {"step": 1, "update": 2, "policy/loss": 2.0, "value/loss": 3.0},
    ]
    assert lines(directory.evaluations) == [{"step": 1, "eval/exact": 0.25, "eval/exact_ci95": 0.1}]
    assert [(line["kind"], line["response"]) for line in lines(directory.samples)] == [
        ("train", "4"),
        ("evaluation", "4"),
    ]
    assert json.loads(directory.summary.read_text()) == {
        "stage": "ppo",
        "steps": 1,
        "seconds": 12.3,
        "start": {"sync/logprob_mean_abs_diff": 1e-6},
        "last_step": {"objective/score": 0.5, "policy/loss": 1.5, "value/loss": 1.0},
        "evaluation": {"eval/exact": 0.25, "eval/exact_ci95": 0.1},
        "export": {"normalisation/mean": 0.5},
    }


def test_updates_are_counted_over_the_whole_run(tmp_path: Path) -> None:
    """Two epochs of two mini-batches: the third step's updates are 9 to 12, of a run that goes on as well."""
    config = load(DEBUG, [f"run.dir={tmp_path}"])
    directory = RunDirectory(config)
    with Reporter(config, directory, taken=2) as reporter:
        reporter.write(StepResult(step=3, metrics={}, updates=[{"policy/loss": 0.0}] * 4))
    assert [line["update"] for line in lines(directory.updates)] == [9, 10, 11, 12]
