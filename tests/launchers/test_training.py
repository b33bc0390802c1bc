"""A pipeline that trains, on this machine, by the NeMo-Run of the project's environment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launchers.scripts import ROOT, user
from tests.leftovers import Trace

pytestmark = [pytest.mark.process, pytest.mark.e2e, pytest.mark.timeout(900)]


def stage(directory: Path, name: str, model: str) -> str:
    """The file of two steps of supervised fine-tuning in one process."""
    file = directory / f"{name}.yaml"
    file.write_text(
        f"defaults: [{ROOT / 'configs/debug/sft.yaml'}]\n"
        f"run: {{dir: {directory / name}, steps: 2}}\n"
        f"model: {model}\n"
        "cluster: {devices_per_node: 1}\n"
        "groups: {train: {devices: 0, roles: {actor: {tp: 1, pp: 1}}}}\n"
    )
    return str(file)


def test_a_pipeline_passes_the_trained_model_to_the_next_stage(tmp_path: Path) -> None:
    trace = Trace()
    first = stage(tmp_path, "first", "{}")
    second = stage(tmp_path, "second", f"{{random: null, path: {tmp_path / 'first' / 'export'}}}")
    caller = user(tmp_path, **trace.environment())
    done = caller.call("pipeline", first, second, "data.evaluation=null", limit_s=800)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [
        [json.loads(line)["sft/loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("first", "second")
    ]
    assert [len(steps) for steps in losses] == [2, 2]
    assert losses[1][0] < losses[0][0]
    assert trace.processes() == []
