"""Two engines that sleep between rollouts give the same run, bit for bit, as the debug run's single awake one.

There are two nodes, with half of the actor and an engine on each: weights go through shared memory and over Gloo.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.e2e.conftest import DebugRun
from tests.e2e.runs import PARTS, lines, train

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

TWO_NODES = ("cluster.nodes=2", "cluster.devices_per_node=2", "rollout.devices=0,2")
TIMES = ("time/", "sync/", "perf/", "memory/", "rollout/engine_idle")


def test_samples_and_updates_do_not_depend_on_the_engines(debug_run: DebugRun, tmp_path: Path) -> None:
    recorded, directory = tmp_path / "recorded", tmp_path / "run"
    finished = train(directory, f"rollout.record={recorded}", "rollout.sleep=true", *TWO_NODES, *PARTS)
    assert finished.status == 0, finished.errors
    finished.assert_clean()

    names = {path.name for path in debug_run.recorded.iterdir()}
    assert {path.name for path in recorded.iterdir()} == names
    writers = set()
    for name in names:
        one, two = np.load(debug_run.recorded / name), np.load(recorded / name)
        for column in ("prompt_ids", "response_ids", "rollout_logprobs", "finished"):
            np.testing.assert_array_equal(one[column], two[column], f"{name}: {column}")
        writers |= {int(engine) for _, _, _, engine in two["versions"]}
    assert writers == {0, 1}

    for mine, theirs in zip(*(lines(run / "metrics.jsonl") for run in (directory, debug_run.directory)), strict=True):
        kept = [{k: v for k, v in line.items() if not k.startswith(TIMES)} for line in (mine, theirs)]
        assert kept[0] == kept[1]
