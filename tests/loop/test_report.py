"""The numbers of a step, by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.cluster.resharder import SyncReport
from megarl.config import load
from megarl.loop.directory import RunDirectory
from megarl.loop.report import Reporter, StepResult
from megarl.types import SampleInfo
from tests.loop.test_assets import DEBUG

RESULT = StepResult(
    step=1,
    samples=[
        SampleInfo(
            sample_id=str(i), prompt_id="p", chunk=0, row=i, prompt_tokens=10, response_tokens=length, finished=ended
        )
        for i, (length, ended) in enumerate([(2, True), (4, False), (6, True), (8, True)])
    ],
    objective={"objective/score": 0.5},
    updates=[{"actor/loss": 1.0, "critic/loss": -1.0}, {"actor/loss": 2.0, "critic/loss": 3.0}],
    transfer=SyncReport(version=1, nbytes=100, seconds=0.25),
    seconds={"time/step": 2.0},
)


def test_a_step_in_numbers() -> None:
    metrics = RESULT.metrics()
    assert metrics["version"] == 1
    assert metrics["objective/score"] == 0.5
    assert metrics["rollout/samples"] == 4
    assert metrics["rollout/response_tokens_mean"] == 5
    assert metrics["rollout/response_tokens_max"] == 8
    assert metrics["rollout/finished"] == 0.75
    assert metrics["actor/loss"] == 1.5
    assert metrics["critic/loss"] == 1.0
    assert metrics["sync/bytes"] == 100
    assert metrics["tokens_per_second"] == 30  # 4 * 10 + 2 + 4 + 6 + 8 = 60 tokens in 2 s


def test_files_have_a_line_per_step_and_per_optimizer_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load(DEBUG, [f"run.dir={tmp_path}"])
    directory = RunDirectory(config)
    with Reporter(config, directory) as reporter:
        reporter.write(RESULT)
    summary = reporter.summary(12.3)
    assert (summary.steps, summary.version, summary.metrics["actor/loss"]) == (1, 1, 1.5)
    assert "1 steps in 12 s" in capsys.readouterr().out
    assert json.loads(directory.metrics.read_text())["actor/loss"] == 1.5
    updates = [json.loads(line) for line in directory.updates.read_text().splitlines()]
    assert updates == [
        {"step": 1, "update": 1, "actor/loss": 1.0, "critic/loss": -1.0},
        {"step": 1, "update": 2, "actor/loss": 2.0, "critic/loss": 3.0},
    ]
