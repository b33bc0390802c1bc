"""Failing jobs: message, exit code, and no leftovers."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.leftovers import comes_true
from tests.slurm.jobs import SFT, Launcher, Run

pytestmark = [pytest.mark.process, pytest.mark.e2e]

PPO = ("configs/debug/ppo.yaml", "run.steps=1000", "--nodes=2", "cluster.devices_per_node=1")


@pytest.mark.matrix
def test_a_node_whose_slurmd_is_killed_is_named(launcher: Launcher, tmp_path: Path) -> None:
    run = launcher.run(tmp_path / "run", *SFT, "run.steps=100000", "--set=requeue=false")
    run.until(lambda: run.steps, "a step was taken")
    launcher.slurm.kill_daemon("n2")
    launcher.slurm.declare_down("n2")
    run.wait("NODE_FAIL")
    assert "srun: error: Node failure on n2" in run.output
    assert run.end["exit_code"] == 128 + signal.SIGTERM
    assert str(run.logs) in launcher.megarl("status", str(run.directory)).stdout
    # Slurm cannot end what runs there: the agent of the node does, as it has lost the head.
    assert comes_true(lambda: not list(launcher.left()), 120)


def test_a_node_whose_ray_is_killed_is_named(launcher: Launcher, tmp_path: Path) -> None:
    run = launcher.run(
        tmp_path / "run",
        *PPO,
        *("groups.train.devices=0", "groups.train.roles.actor={tp: 1, pp: 1}"),
        *("groups.train.roles.critic.pp=1", "groups.train.roles.reference.tp=1", "rollout.devices=1"),
    )
    run.until(lambda: run.steps, "a step was taken")
    (raylet,) = launcher.processes("n2", "raylet/raylet")
    os.kill(raylet, signal.SIGKILL)
    assert run.wait("FAILED") == "1:0"
    assert run.end["node"] == "n2"
    assert run.end["reason"].startswith("node n2 was lost: its Ray has ended with exit code 1")
    assert run.end["reason"] in run.output
    assert run.end["reason"] in (run.logs / "driver.log").read_text()
    assert run.end["exit_code"] == 1
    assert (run.logs / "ray-worker-1" / "raylet.out").exists()


@pytest.mark.matrix
def test_scancel_ends_a_run_cleanly(launcher: Launcher, tmp_path: Path) -> None:
    run = launcher.run(tmp_path / "run", *SFT, "run.steps=100000")
    run.until(lambda: run.steps, "a step was taken")
    launcher.slurm.run("scancel", str(run.job))
    run.wait("CANCELLED")
    assert run.end == {"exit_code": 128 + signal.SIGTERM, "reason": "node n1 got SIGTERM", "node": None}
    assert "was lost" not in run.output
    assert "SIGTERM" in launcher.megarl("status", str(run.directory)).stdout


def test_a_configuration_mistake_ends_the_job_with_code_2_before_ray_starts(launcher: Launcher, tmp_path: Path) -> None:
    """Users may edit the script and the configuration, so mistakes can be found in the job."""
    directory = tmp_path / 'it\'s "100%" of $HOME'
    assert launcher.launch(*SFT, f"run.dir={directory}", "--dry-run") == []
    (config,) = directory.glob("slurm/config-*.yaml")
    config.write_text(config.read_text().replace("sequences_per_step: 16", "sequences_per_step: 0"))
    run = Run(slurm=launcher.slurm, job=launcher.submit(directory / "slurm" / "job.sbatch"), directory=directory)
    assert run.wait("FAILED") == "2:0"
    assert "data.sequences_per_step" in run.output
    assert not run.logs.exists(), "Ray starts in the job's directory, which is made of a sound configuration"
