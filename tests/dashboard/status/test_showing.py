"""The printed status, and the command."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from typer.testing import CliRunner

from megarl.cli import app
from megarl.dashboard.status import show
from megarl.dashboard.status.reading import StateName, read_status
from tests.config.debug import REPOSITORY
from tests.dashboard.status.directories import NOW, MadeRun

PAGE = (REPOSITORY / "docs" / "status.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MadeRun:
    """A run on another machine, resumed by a second job, without progress for 47 minutes."""
    monkeypatch.chdir(tmp_path)
    made = MadeRun(Path("runs/ppo"))
    made.start(1, ago=90000, job="4710")
    made.end(1, ago=20000, step=21, reason="run error", message="train rank 3 died in update\nand so on")
    made.start(2, ago=8000, step=20, job="4711")
    made.steps(20, ago=30000, apart=120)
    made.steps(47, ago=47 * 60, apart=120, first=21)
    made.checkpoint(40, 1_572_864)
    made.job("4711-0")
    return made


def test_a_run_is_shown_as_documented(run: MadeRun) -> None:
    with run.locked():
        shown = [f"{label:12}{text}" for label, text in show.rows(read_status(run.path, NOW, "login"))]
    (block,) = re.findall(r"^    run  .*\n(?:    .*\n)+", PAGE, flags=re.MULTILINE)
    assert shown == [line[4:] for line in block.splitlines()]


def test_every_state_is_documented() -> None:
    assert set(re.findall(r"^\| ([a-z]+) \| [A-Z`]", PAGE, flags=re.MULTILINE)) == set(get_args(StateName))


def row(run: MadeRun, label: str, host: str = "login") -> str:
    """The text of a label, with its further lines."""
    texts = []
    current = ""
    for found, text in show.rows(read_status(run.path, NOW, host)):
        current = found or current
        if current == label:
            texts.append(text)
    return "\n".join(texts)


def test_a_run_without_recent_output_is_silent(run: MadeRun) -> None:
    assert row(run, "state") == "silent on n1 (job 4711), last written 47 min ago (21:26)"
    assert "runs/ppo/slurm/4711-0" in row(run, "logs")


def test_the_end_and_its_reason(run: MadeRun) -> None:
    message = "configuration: 1 problem\n  data = changed"
    run.end(2, ago=600, step=47, reason="config error", message=message)
    assert row(run, "state") == f"failed 10 min ago (22:03)\n{message}"
    assert " left" not in row(run, "pace")


def test_a_standalone_evaluation_has_no_steps(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "run", stage="eval")
    (run.path / "config.yaml").write_text("stage: eval\nrun: {dir: run}\n")
    run.start(1, ago=600)
    run.evaluation(0, ago=60, score=1.5, score_ci95=0.25)
    run.end(1, ago=50, step=0, reason="finished")
    (run.path / "summary.json").write_text("{}")
    assert row(run, "state") == "finished 50 s ago (22:12)"
    assert row(run, "step") == ""


def test_replaced_engines_and_drafts_are_named(run: MadeRun) -> None:
    run.step(48, 60, rollout__engines_replaced=2, rollout__draft_share=0.25)
    assert "2 engines replaced" in row(run, "look at")
    assert row(run, "drafts") == "25% of the sampled tokens"


def test_the_error_of_the_attempt_before_is_shown(run: MadeRun) -> None:
    shown = row(run, "attempts")
    assert shown.startswith("2; ")
    assert shown.endswith("run error after step 21 (train rank 3 died in update)")
    run.start(3, ago=60, step=40)
    assert row(run, "attempts").endswith("killed: it wrote no reason")


def test_several_runs_are_aligned_rows(run: MadeRun) -> None:
    other = MadeRun(Path("a-new-run"), stage="sft")
    assert list(show.table([read_status(made.path, NOW, "login") for made in (run, other)])) == [
        "run        state    step    steps/h  left  saved  notes",
        "runs/ppo   silent   47/100  30       -     40",
        "a-new-run  waiting  0/100   -        -     -",
    ]
    run.end(2, ago=600, step=47, reason="run error", message="train rank 3 died " * 9)
    _, line = show.table([read_status(run.path, NOW, "login")])
    assert line.endswith(f"40     {('train rank 3 died ' * 9)[:57]}...")


@pytest.mark.process
def test_the_command_works_without_heavy_packages(run: MadeRun) -> None:
    """A login node has no torch, no Ray and no numpy; the configuration's schema is not loaded."""
    code = """
import sys
absent = ("torch", "transformers", "ray", "vllm", "megatron.core", "numpy", "omegaconf")
sys.modules.update(dict.fromkeys(absent))
from megarl.cli import main
main()
"""
    arguments = [sys.executable, "-c", code, "status", str(run.path.absolute())]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, cwd=REPOSITORY)
    assert (done.returncode, done.stderr) == (0, "")
    assert "47 of 100 (47%)" in done.stdout


def test_json_has_all_fields(run: MadeRun) -> None:
    MadeRun(Path("sweep") / "seed-0")
    MadeRun(Path("sweep") / "seed-1")
    done = CliRunner().invoke(app, ["status", "--json", "runs/ppo", "sweep"])
    assert done.exit_code == 0
    first, *others = [json.loads(line) for line in done.stdout.splitlines()]
    assert [other["directory"] for other in others] == ["sweep/seed-0", "sweep/seed-1"]
    assert (first["progress"]["step"], first["progress"]["steps"]) == (47, 100)
    assert ([saved["step"] for saved in first["checkpoints"]], first["job_logs"]) == ([40], "runs/ppo/slurm/4711-0")
    assert first["progress"]["pace"]["seconds_per_step"] == 120
    assert first["attempts"][0]["end"]["message"].startswith("train rank 3 died")
    assert first["metrics"]["objective/score"] == 0.47


def test_a_directory_without_a_run_is_reported_after_the_others(run: MadeRun) -> None:
    done = CliRunner().invoke(app, ["status", "nowhere", "runs"])
    assert done.exit_code == 2
    assert done.stderr == "nowhere: there is no such directory; give the run.dir of a run\n"
    assert "47 of 100" in done.stdout


def test_an_unreadable_directory_does_not_hide_the_others(run: MadeRun) -> None:
    (MadeRun(Path("other")).path / "metrics.jsonl").mkdir()  # an error of the system that root gets, too
    done = CliRunner().invoke(app, ["status", "other", "runs"])
    assert (done.exit_code, done.stderr) == (2, "other/metrics.jsonl: Is a directory\n")
    assert "47 of 100" in done.stdout
