"""What a run writes, read back."""

from __future__ import annotations

import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from megarl.config import TrainingConfig, load
from megarl.config.schema import Correction
from megarl.errors import RunError
from megarl.run.directory import RunDirectory
from megarl.run.report import Reporter, run_columns
from megarl.run.results import EvaluationResult, StepResult
from megarl.stages.ppo.config import PPOConfig
from tests.config.debug import DEBUG
from tests.run.test_samples import SAMPLE

RESULT = StepResult(
    step=1,
    metrics={"objective/score": 0.5},
    updates=[{"policy/loss": 1.0, "value/loss": -1.0}, {"policy/loss": 2.0, "value/loss": 3.0}],
    samples=[SAMPLE],
)
SCORES = {"p": {"exact": [0.0, math.nan]}}
METRICS = {"eval/exact": 0.25, "eval/exact_ci95": 0.1}
EVALUATION = EvaluationResult(step=1, metrics=METRICS, samples=[SAMPLE], prompts=SCORES)


def lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file, without the time at which each was written."""
    objects = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "time/written"} for line in objects]


def test_metrics_of_updates_are_means_over_those_that_have_them_or_extremes() -> None:
    updates = [{"a": 1.0, "b": 4.0, "x_max": 1.5, "x_min": 0.5}, {"a": 3.0, "x_max": 1.0, "x_min": 0.25}]
    result = StepResult(step=1, metrics={"version": 1}, updates=updates)
    assert result.all_metrics() == {"version": 1, "a": 2.0, "b": 4.0, "x_max": 1.5, "x_min": 0.25}


def test_every_file_has_its_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load(DEBUG, [f"run.dir={tmp_path}", "run.steps=1"])
    directory = RunDirectory(config)
    now = [1.0]
    with Reporter(config, directory, taken=0, clock=lambda: now[0]) as reporter:
        reporter.phase("Ray")
        now[0] = 5.0
        reporter.phase("5 processes")
        now[0] = 9.0
        reporter.started({"sync/logprob_mean_abs_diff": 1e-6})
        reporter.write(RESULT)
        reporter.evaluated(EVALUATION)
        reporter.evaluated(None)
        now[0] = 12.3
        reporter.finished({"normalisation/mean": 0.5})
    printed = capsys.readouterr().out
    assert printed.splitlines()[:4] == [
        "     1 s  Ray",
        "     5 s  5 processes",
        "started in 9 s",
        f"the processes print into {directory.logs}",
    ]
    assert "no score" not in printed
    assert "evaluation after step 1" in printed
    assert ["exact", "0.25", "0.1"] in [line.split() for line in printed.splitlines()]
    assert "1 step in 12 s" in printed
    assert "megarl view" not in printed, "for terminals alone"
    assert lines(directory.metrics) == [{"step": 1, "objective/score": 0.5, "policy/loss": 1.5, "value/loss": 1.0}]
    assert lines(directory.updates) == [
        {"step": 1, "update": 1, "policy/loss": 1.0, "value/loss": -1.0},
        {"step": 1, "update": 2, "policy/loss": 2.0, "value/loss": 3.0},
    ]
    assert lines(directory.evaluations) == [{"step": 1, "eval/exact": 0.25, "eval/exact_ci95": 0.1}]
    assert [(line["kind"], line["response"]) for line in lines(directory.samples)] == [
        ("train", "ab"),
        ("evaluation", "ab"),
    ]
    assert lines(directory.prompt_scores) == [{"step": 1, "prompt_id": "p", "scores": {"exact": [0.0, None]}}]
    assert json.loads(directory.summary.read_text()) == {
        "stage": "ppo",
        "steps": 1,
        "seconds": 12.3,
        "start": {"sync/logprob_mean_abs_diff": 1e-6},
        "last_step": {"objective/score": 0.5, "policy/loss": 1.5, "value/loss": 1.0},
        "evaluation": {"eval/exact": 0.25, "eval/exact_ci95": 0.1},
        "export": {"normalisation/mean": 0.5},
    }


class Terminal(io.StringIO):
    """Standard output of 100 columns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        monkeypatch.setattr(sys, "stdout", self)
        for name, value in {"TERM": "xterm", "COLUMNS": "100", "LINES": "40", "NO_COLOR": "1"}.items():
            monkeypatch.setenv(name, value)

    def isatty(self) -> bool:
        return True


def test_in_a_terminal_everything_is_above_the_bar_until_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(DEBUG, [f"run.dir={tmp_path / 'a run'}", "run.steps=1"])
    terminal = Terminal(monkeypatch)
    with Reporter(config, RunDirectory(config), taken=0, clock=lambda: 12.3) as reporter:
        reporter.phase("rollout")
        reporter.started({})
        reporter.write(RESULT)
        reporter.evaluated(EVALUATION)
        assert "0/1" in terminal.getvalue(), "the bar is there from the beginning"
        reporter.finished({})
    drawn = terminal.getvalue()
    erased = "\x1b[2K"
    for line in ("evaluation after step 1", "  1/1      0.5"):
        assert drawn.partition(line)[0].endswith(erased), f"{line} is behind the bar"
    *_, end = drawn.split("\x1b[?25h")  # the cursor is back: the bar stays as it is
    assert end.splitlines()[-1].startswith(f"megarl view '{tmp_path}/a run'")


def unscored(step: int, **counts: int) -> StepResult:
    """A step of 16 responses, some of which two functions did not score."""
    metrics = {f"rewards/unscored/{name}": count for name, count in counts.items()}
    metrics |= {"rewards/unscored": max(counts.values()), "rollout/samples": 16}
    return StepResult(step=step, metrics=metrics, updates=[])


def test_responses_without_a_score_are_reported_per_step_and_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The totals include the steps of an earlier attempt."""
    config = load(DEBUG, [f"run.dir={tmp_path}", "run.steps=3"])
    directory = RunDirectory(config)
    with Reporter(config, directory, taken=0) as reporter:
        reporter.write(unscored(1, mixed=16, length=3))
    with Reporter(config, directory, taken=1, clock=lambda: 12.3) as reporter:
        reporter.write(unscored(2, mixed=0, length=0))
        reporter.write(unscored(3, mixed=2, length=0))
        reporter.finished({})
    printed = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] if "have no score" in line else line for line in printed if "no score" in line] == [
        "step 1",
        f"3 steps in 12 s; 18 of 48 responses had no score; the model is in {directory.export}",
    ]
    summary = json.loads(directory.summary.read_text())
    assert summary["responses"] == {"sampled": 48, "unscored": 18}
    (finding,) = summary["findings"]
    assert (finding["metric"], finding["first"], finding["last"]) == ("rewards/unscored", 1, None)
    assert finding["text"].startswith("16 of 16 responses have no score (mixed: 16, length: 3): ")
    assert not summary.keys() & {"start", "evaluation", "export"}, "there is nothing in them"


def test_an_interrupted_run_prints_how_to_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load(DEBUG, [f"run.dir={tmp_path}"])
    directory = RunDirectory(config)

    def end(kind: type[BaseException]) -> str:
        with pytest.raises(kind), Reporter(config, directory, taken=0):
            raise kind
        return capsys.readouterr().err

    assert end(KeyboardInterrupt).endswith("The same command starts it again\n")
    for step in (2, 4):
        (directory.path / "checkpoints" / f"step-{step}").mkdir(parents=True)
    assert end(SystemExit).endswith("The same command resumes after step 4, that of the last checkpoint\n")
    assert end(ValueError) == ""


def test_a_tracker_that_does_not_start_ends_the_run_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("no route to the server")

    monkeypatch.setattr("megarl.run.report.open_mlflow", refuse)
    config = load(DEBUG, [f"run.dir={tmp_path}", "tracking.mlflow_experiment=mine"])
    with (
        pytest.raises(RunError, match="no route to the server; correct that"),
        Reporter(config, RunDirectory(config), taken=0),
    ):
        pass


def test_updates_are_counted_over_the_whole_run(tmp_path: Path) -> None:
    """Two epochs of two mini-batches: the third step's updates are 9 to 12, of a resumed run, too."""
    config = load(DEBUG, [f"run.dir={tmp_path}"])
    directory = RunDirectory(config)
    with Reporter(config, directory, taken=2) as reporter:
        reporter.write(StepResult(step=3, metrics={}, updates=[{"policy/loss": 0.0}] * 4))
    assert [line["update"] for line in lines(directory.updates)] == [9, 10, 11, 12]


def units(config: TrainingConfig) -> dict[str, str]:
    """By heading."""
    return {column.heading: column.unit for column in run_columns(config).values()}


def test_the_columns_fit_the_algorithm() -> None:
    ppo, config = units(load(DEBUG)), load(DEBUG.with_stem("grpo"))
    grpo = units(config)
    assert {"KL", "expl. var", "engine diff"} <= set(ppo)
    assert set(ppo) - set(grpo) == {"expl. var"}
    assert set(ppo) - set(units(load(DEBUG, ["data.samples_per_prompt=1", "algo.mini_batches=1"]))) == {"zero std"}
    assert isinstance(config, PPOConfig)
    group = config.groups["train"]
    alone = group.model_copy(update={"roles": {"actor": group.roles["actor"]}})
    algo = config.algo.model_copy(update={"correction": Correction(old_logprobs="rollout")})
    without = units(config.model_copy(update={"groups": {"train": alone}, "algo": algo}))
    assert set(grpo) - set(without) == {"KL", "engine diff"}
    assert (ppo["approx KL"], ppo["truncated"], ppo["length"]) == ("< 0.05", "< 0.2", "tokens")
    assert list(units(load(DEBUG.with_stem("sft")))) == ["loss", "lr", "grad norm", "tokens/s", "step s"]
