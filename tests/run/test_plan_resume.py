"""`megarl plan` refuses and reports what `megarl train` would, and changes nothing."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from megarl.cli import app
from megarl.cluster import cpu_threads
from megarl.config import ConfigError, load
from megarl.run.directory import EvaluationDirectory, RunDirectory
from tests.config.debug import REPOSITORY, debug
from tests.run.staging import content, save

CONFIGS = REPOSITORY / "configs" / "debug"
AUTO = "cluster.threads_per_device=auto"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of 10 steps with a checkpoint after the sixth."""
    monkeypatch.chdir(REPOSITORY)
    path = tmp_path / "run"
    with closing(RunDirectory(debug(f"run.dir={path}", "run.steps=10"))) as directory:
        save(directory, 6)
    return path


def plan(run: Path, *overrides: str, stage: str = "ppo") -> Result:
    """The command's result; it leaves the directory as it was."""
    before = content(run)
    arguments = ["plan", str(CONFIGS / f"{stage}.yaml"), f"run.dir={run}", *overrides]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "120"})
    assert content(run) == before
    return result


def resume_line(result: Result) -> str | None:
    assert result.exit_code == 0, result.stderr
    lines = {line[:13].strip(): line[14:] for line in result.stdout.splitlines()}
    return lines.get("resume")


def test_only_a_run_with_a_checkpoint_keeps_its_threads(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_threads, "usable_cores", lambda: 64)
    failed = tmp_path / "failed"
    RunDirectory(debug(f"run.dir={failed}")).close()
    assert "threads" not in plan(run, "run.steps=10", AUTO).stdout
    assert "threads: 16 of each trainer rank, 64 of each engine rank" in plan(failed, AUTO).stdout


def test_a_run_without_a_checkpoint_starts_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    assert resume_line(plan(tmp_path / "new")) is None
    assert not (tmp_path / "new").exists()
    RunDirectory(debug(f"run.dir={tmp_path}")).close()
    assert resume_line(plan(tmp_path)) == "from the beginning: there is no checkpoint yet"


def test_a_run_resumes_after_its_checkpoint_or_is_finished(run: Path) -> None:
    assert resume_line(plan(run, "run.steps=10")) == "after step 6"
    with closing(RunDirectory(debug(f"run.dir={run}", "run.steps=10"))) as directory:
        save(directory, 10)
        directory.summary.write_text("{}")
    assert "is finished: it has taken its 10 steps" in str(resume_line(plan(run, "run.steps=10")))
    assert resume_line(plan(run, "run.steps=12")) == "after step 10"


@pytest.mark.parametrize("overrides", [["run.seed=5", "run.steps=5"], ["run.steps=10"]], ids=["changed", "damaged"])
def test_plan_reports_the_same_problems_as_train(run: Path, overrides: list[str]) -> None:
    if overrides == ["run.steps=10"]:
        (run / "checkpoints/step-6/actor/0-0.bin").write_bytes(b"")
    with pytest.raises(ConfigError) as refusal:
        RunDirectory(load(CONFIGS / "ppo.yaml", [f"run.dir={run}", *overrides]))
    result = plan(run, *overrides)
    assert (result.exit_code, result.stdout) == (2, "")
    assert all(str(problem) in result.stderr for problem in refusal.value.problems)


def test_a_run_locked_by_another_process_is_refused(run: Path) -> None:
    with closing(RunDirectory(debug(f"run.dir={run}", "run.steps=10"))):
        result = plan(run, "run.steps=10")
    assert result.exit_code == 2
    assert "is run by one process at a time" in result.stderr


@pytest.mark.process
def test_an_evaluation_into_a_runs_directory_is_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = plan(run, stage="eval")
    assert result.exit_code == 2
    assert "has nothing that would be lost; it has a training run" in result.stderr
    interrupted = tmp_path / "interrupted"
    EvaluationDirectory(load(CONFIGS / "eval.yaml", [f"run.dir={interrupted}"])).close()
    monkeypatch.setattr(cpu_threads, "usable_cores", lambda: 64)
    result = plan(interrupted, AUTO, stage="eval")
    assert (result.exit_code, "64 of each engine rank" in result.stdout) == (0, True), "it begins anew"
