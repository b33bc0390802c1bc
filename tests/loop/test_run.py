"""What is looked at before a run starts its processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config import ConfigError, load
from megarl.loop import train
from tests.loop.test_assets import DEBUG


def test_a_run_on_gpus_needs_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    config = load(DEBUG, ["cluster.device=cuda", f"run.dir={directory}"])
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    with pytest.raises(
        ConfigError, match=r"cluster.devices_per_node = 4\n    rule: at most the GPUs of this machine, 3"
    ):
        train.train(config)
    assert not directory.exists()
