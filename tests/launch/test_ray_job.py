"""Runs as jobs of a Ray cluster with a dashboard and a token, as docs/ray.md has it."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.files import read_lines
from megarl.run.attempts import read_attempts
from tests.launch.ray_head import RayHead
from tests.leftovers import comes_true

pytestmark = [pytest.mark.process, pytest.mark.e2e]


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as directory, RayHead(Path(directory)) as started:
        yield started


def submit(head: RayHead, run_dir: Path, last_step: int, *options: str) -> tuple[int, str]:
    layout = ["groups.train.devices=0-1", "groups.train.roles.actor.pp=1", "cluster.address=auto"]
    command = [sys.executable, "-m", "megarl", "train", "configs/debug/sft.yaml", f"run.dir={run_dir}", *layout]
    done = head.job("submit", *options, "--", *command, f"run.steps={last_step}")
    return done.returncode, done.stdout + done.stderr


def steps(run_dir: Path) -> list[int]:
    return [line["step"] for line in read_lines(run_dir / "metrics.jsonl")]


def test_a_stopped_job_saves_and_another_one_finishes_its_run(head: RayHead, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    patience = json.dumps({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"}})
    options = ["--no-wait", "--submission-id", "first", "--runtime-env-json", patience]
    code, output = submit(head, run_dir, 100_000, *options)
    assert code == 0, output
    assert comes_true(lambda: len(steps(run_dir)) > 1, 500), head.job("logs", "first").stdout
    stopped = head.job("stop", "first")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    (attempt,) = read_attempts(run_dir / "attempts.jsonl")
    assert attempt.end is not None
    assert attempt.end.reason == "preempted"
    last_step = len(steps(run_dir)) + 3
    code, output = submit(head, run_dir, last_step)
    assert code == 0, output
    assert steps(run_dir) == list(range(1, last_step + 1))
    assert (run_dir / "export" / "model.safetensors").exists()


@pytest.mark.matrix
def test_a_mistake_in_the_configuration_fails_the_job(head: RayHead, tmp_path: Path) -> None:
    code, output = submit(head, Path("/proc/none"), 4)
    assert code == 1
    assert "run.dir = /proc/none" in output
    assert "exit code 2" in output
