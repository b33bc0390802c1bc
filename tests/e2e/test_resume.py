"""A terminated run resumes exactly, by itself if a rank is killed; a finished run only reports that it is finished."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megarl.cli import app
from megarl.run.attempts import read_attempts
from tests.e2e.conftest import DebugRun
from tests.e2e.runs import DEBUG, PARTS, finish, lines, started, train

pytestmark = pytest.mark.e2e
TERMINATED = """\
import os, signal; from megarl.loop.ppo import PPOTrainer; step = PPOTrainer.step; \
PPOTrainer.step = lambda trainer, number: os.kill(os.getpid(), signal.SIGTERM) or step(trainer, number)"""
"""The run gets a signal in its first step."""


def numbers(file: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file, without times."""
    timed = ("time/", "perf/", "sync/", "memory/", "rollout/engine_idle")
    return [{name: value for name, value in line.items() if not name.startswith(timed)} for line in lines(file)]


@pytest.fixture(scope="module")
def resumed(debug_run: DebugRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The debug run, terminated in its first step, and resumed as if it had been killed in its third one, too."""
    assert debug_run.finished.status == 0, debug_run.finished.errors
    directory = tmp_path_factory.mktemp("resumed") / "run"
    overrides = ("checkpoint.every=2", "run.grace_period=200", *PARTS)
    with started(["train", DEBUG, f"run.dir={directory}", *overrides], TERMINATED) as run:
        left = finish(*run)
    assert left.status == 75, left.errors
    assert "preempted after step 1: it got SIGTERM" in left.errors
    left.assert_clean()
    (directory / "checkpoints" / ".step-3.staged").mkdir()
    with (directory / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 2}\n{"step": 3, "obj')
    finished = train(directory, *overrides)
    assert finished.status == 0, finished.errors
    assert "resuming after step 1" in finished.output
    finished.assert_clean()
    return directory


FILES = ["metrics.jsonl", "updates.jsonl", "evaluations.jsonl", "samples.jsonl"]


@pytest.mark.parametrize("file", FILES)
def test_a_resumed_run_has_the_metrics_of_the_uninterrupted_run(debug_run: DebugRun, resumed: Path, file: str) -> None:
    assert numbers(resumed / file) == numbers(debug_run.directory / file)


def test_a_resumed_run_exports_the_model_of_the_uninterrupted_run(debug_run: DebugRun, resumed: Path) -> None:
    for export in ("export", "export-ema"):
        straight = debug_run.directory / export / "model.safetensors"
        assert (resumed / export / "model.safetensors").read_bytes() == straight.read_bytes(), export


def test_a_resumed_run_keeps_the_checkpoints(debug_run: DebugRun, resumed: Path) -> None:
    for directory in (debug_run.directory, resumed):
        assert sorted(path.name for path in (directory / "checkpoints").iterdir()) == ["step-2", "step-3"]


def test_checkpoints_are_listed_and_intact(debug_run: DebugRun) -> None:
    """That of the second step was written during the third."""
    listed = CliRunner().invoke(app, ["checkpoints", str(debug_run.directory), "--verify"], env={"COLUMNS": "200"})
    assert listed.exit_code == 0, listed.output
    rows = [line.split() for line in listed.output.splitlines()[1:]]
    assert [(row[0], row[-2], row[-1]) for row in rows] == [("2", "newest", "intact"), ("3", "newest", "intact")]


def test_a_resumed_run_is_a_new_attempt(resumed: Path) -> None:
    first, second = read_attempts(resumed / "attempts.jsonl")
    assert first.end is not None
    assert second.end is not None
    assert (first.step, first.end.step, first.end.reason) == (0, 1, "preempted")
    assert (second.step, second.end.step, second.end.reason) == (1, 3, "finished")


def test_a_run_with_a_killed_rank_restarts_and_ends_as_if_nothing_had_happened(
    debug_run: DebugRun, tmp_path: Path
) -> None:
    directory, settings = tmp_path / "run", ["checkpoint.every=2", "run.max_restarts=1", *PARTS]
    strike = "from tests.e2e.strikes import after_checkpoint; after_checkpoint(2, 'train-rank-1.log')"
    with started(["train", DEBUG, f"run.dir={directory}", *settings], before=strike) as program:
        finished = finish(*program)
    assert finished.status == 0, finished.errors
    finished.assert_clean()
    (announced,) = [line for line in finished.output.splitlines() if "; restart 1 of 1 from step 2" in line]
    assert announced.startswith("train rank 1 died in ")
    attempts = read_attempts(directory / "attempts.jsonl")
    assert [(each.step, each.end and each.end.reason) for each in attempts] == [(0, "run error"), (2, "finished")]
    for file in FILES:
        assert numbers(directory / file) == numbers(debug_run.directory / file), file
    for export in ("export", "export-ema"):
        straight = debug_run.directory / export / "model.safetensors"
        assert (directory / export / "model.safetensors").read_bytes() == straight.read_bytes(), export


def test_resuming_a_finished_run_reports_that_it_is_finished(debug_run: DebugRun) -> None:
    before = {path: path.stat().st_mtime_ns for path in debug_run.directory.rglob("*")}
    finished = train(debug_run.directory, "checkpoint.every=2", *PARTS)
    assert finished.status == 0, finished.errors
    assert "is finished: it has taken its 3 steps" in finished.output
    assert {path: path.stat().st_mtime_ns for path in debug_run.directory.rglob("*")} == before
