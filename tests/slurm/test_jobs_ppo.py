"""PPO as a job of two nodes, from its submission to its export."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launch.node_job import STAGES
from tests.slurm.jobs import Launcher

pytestmark = [pytest.mark.process, pytest.mark.e2e]

# Steps for as long as the test looks at the job while it runs.
PPO = ("configs/debug/ppo.yaml", "run.steps=5", "--nodes=2", "cluster.devices_per_node=2")


def test_ppo_on_two_nodes(launcher: Launcher, tmp_path: Path) -> None:
    run = launcher.run(tmp_path / "run", *PPO)

    run.until(lambda: "driver started" in run.stages, "Ray was ready")
    run.until(lambda: run.steps, "a step was taken")
    (head,) = launcher.processes("n1", "megarl\0train")
    (secret,) = re.findall(rb"RAY_AUTH_TOKEN=(\w+)", Path(f"/proc/{head}/environ").read_bytes())
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if secret in content(path)]
    kinds = ("ray::RayWorker", "ray::SteppingRayWorker")
    ranks = {node: [len(launcher.processes(node, kind)) for kind in kinds] for node in ("n1", "n2")}
    assert "running" in launcher.megarl("status", str(run.directory)).stdout

    assert run.wait("COMPLETED") == "0:0"
    assert ranks == {"n1": [2, 1], "n2": [2, 0]}  # the engine is on the first device
    assert [step["step"] for step in run.steps] == list(range(1, 6))
    assert (run.directory / "summary.json").exists()
    assert (run.directory / "export" / "config.json").exists()
    assert "finished" in launcher.megarl("status", str(run.directory)).stdout

    assert list(run.stages) == list(STAGES)
    assert sorted(run.stages.values()) == list(run.stages.values())
    assert run.end == {"exit_code": 0, "reason": "finished", "node": None}
    driver = (run.logs / "driver.log").read_text()
    assert driver in run.output
    assert "summary" in driver or "export" in driver
    assert {"driver.log", "head.log", "worker-1.log"} <= {file.name for file in run.logs.iterdir()}
    assert not [path for path in run.directory.rglob("*") if path.is_file() and secret in content(path)]


def content(path: Path) -> bytes:
    """The bytes of a file; empty if it has been removed."""
    try:
        return path.read_bytes()
    except OSError:
        return b""
