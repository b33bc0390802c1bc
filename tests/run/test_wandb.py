"""Weights & Biases, offline."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.run.sinks import open_wandb
from tests.leftovers import Trace


@pytest.mark.process
def test_a_run_offline_stays_in_its_directory_and_leaves_nothing_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    trace = Trace()
    for name, value in {**trace.environment(), "WANDB_MODE": "offline", "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    directory = tmp_path / "run"
    ids: set[str] = set()
    for step in (1, 2):
        sink = open_wandb("mine", directory, {"run": {"steps": 2}})
        assert trace.processes(), "wandb has no process: the test looks at nothing"
        ids.add(wandb.run.id)
        sink.write(step, {"objective/kl": 0.5})
        sink.write(step - 1, {"eval/exact": 0.25})  # of an evaluation that ended late
        assert (wandb.run.summary["objective/kl"], wandb.run.summary["eval/exact"]) == (0.5, 0.25)
        sink.close()
    assert len(ids) == 1, "the second run is another one"
    assert list(directory.glob("wandb/offline-run-*/run-*.wandb"))
    assert not trace.processes()
    assert not trace.shared_memory()
