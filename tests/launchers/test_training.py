"""A run that trains, on this machine, by NeMo-Run.

tests/slurm/test_nemo_run.py passes trained models from stage to stage; the order of stages here is in test_local.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.files import read_lines
from tests.launchers.scripts import ROOT, user
from tests.leftovers import Trace
from tests.random_models import place_random_model

pytestmark = [pytest.mark.process, pytest.mark.e2e]

ALONE = (
    "configs/debug/sft.yaml",
    *("cluster.devices_per_node=1", "groups.train.devices=0", "groups.train.roles.actor={tp: 1, pp: 1}"),
    *("data.evaluation=null", "run.steps=2"),
)
"""Two steps of supervised fine-tuning in one process."""


def test_a_run_trains_and_leaves_nothing(tmp_path: Path) -> None:
    trace = Trace()
    caller = user(tmp_path, **trace.environment())
    settings = (*ALONE, f"run.dir={tmp_path / 'run'}")
    place_random_model(ROOT / settings[0], *settings[1:])
    done = caller.call("ppo", *settings, limit_s=800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [step["step"] for step in read_lines(tmp_path / "run" / "metrics.jsonl")] == [1, 2]
    assert (tmp_path / "run" / "export" / "config.json").exists()
    assert trace.processes() == []
