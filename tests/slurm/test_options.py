"""The scripts of ``megarl launch slurm`` as parsed by Slurm; the jobs are inspected, but not started."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm.jobs import Launcher

pytestmark = [pytest.mark.process, pytest.mark.e2e]

GPUS = ("configs/debug/ppo.yaml", "cluster.device=cuda", "--nodes=2", "--gpus-per-node=8", "groups.train.devices=0-7")


def held(launcher: Launcher, directory: Path, *arguments: str) -> list[dict[str, str]]:
    """What the controller says of a job that is submitted and held."""
    job = launcher.launch(f"run.dir={directory}", "--set=sbatch=[--hold]", *arguments)
    return launcher.slurm.jobs(job[0])


def test_a_job_of_whole_nodes_with_gpus(launcher: Launcher, tmp_path: Path) -> None:
    (job,) = held(launcher, tmp_path / "run", *GPUS, "rollout.devices=8-15", "--set=exclusive=true")
    assert (job["NumNodes"], job["TresPerNode"], job["NtasksPerN:B:S:C"]) == ("2-2", "gres:gpu:8", "1:0:*:*")
    assert (job["OverSubscribe"], job["MinMemoryNode"], job["Requeue"]) == ("NO", "0", "1")
    assert job["StdOut"] == f"{tmp_path}/run/slurm/{job['JobId']}.out"
    assert job["JobName"] == "run"


def test_an_array_of_whole_jobs_passes_through(launcher: Launcher, tmp_path: Path) -> None:
    (job,) = held(launcher, tmp_path / "run", *GPUS, "rollout.devices=8-15", "--set=sbatch=[--hold, --array=0-5%2]")
    assert (job["ArrayTaskId"], job["ArrayTaskThrottle"]) == ("0-5%2", "2")
