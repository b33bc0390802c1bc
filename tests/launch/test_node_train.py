"""A run on two nodes, resumed by another job."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from tests.launch.node_job import NUMBER, ONE_EACH, ROOT, NodeJob
from tests.random_models import place_random_model

pytestmark = [pytest.mark.process, pytest.mark.e2e, pytest.mark.timeout(600)]

_LONG_S = 400.0


def test_a_run_trains_on_two_nodes_and_resumes_in_another_job() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="nodes-") as directory:
        first = _trained(Path(directory), NUMBER, steps=1)
        losses = _losses(first)
        second = _trained(Path(directory), NUMBER + 1, steps=2)
        assert "resuming after step 1" in second.output(0)
        assert _losses(second)[:1] == losses
        assert len(_losses(second)) == 2
        changed = (first.run / "config.until-step-1.yaml").read_text().splitlines()
        kept = (first.run / "config.yaml").read_text().splitlines()
        assert set(changed) ^ set(kept) == {"  steps: 1", "  steps: 2"}


def _trained(directory: Path, number: int, *, steps: int) -> NodeJob:
    place_random_model(ROOT / "configs/debug/sft.yaml", f"run.dir={directory / 'run'}")
    with NodeJob(directory, None, *ONE_EACH, f"run.steps={steps}", number=number) as job:
        assert job.exit_codes(_LONG_S) == (0, 0), job.output(0) + job.log("head.log")
        assert "2 processes on 2 nodes with their models" in job.output(0)
        assert job.left() == ([], set(), [])
        assert job.end()["exit_code"] == 0
        return job


def _losses(job: NodeJob) -> list[float]:
    lines = (job.run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["sft/loss"] for line in lines]
