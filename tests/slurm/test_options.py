"""The scripts of ``megarl launch slurm`` as parsed by Slurm; the jobs are inspected, but not started."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Slurm
from tests.slurm.jobs import Launcher

pytestmark = [pytest.mark.process, pytest.mark.e2e]

GPUS = ("configs/debug/ppo.yaml", "cluster.device=cuda", "--nodes=2", "--gpus-per-node=8", "groups.train.devices=0-7")
EVERYTHING = (
    *("--account=root", "--qos=normal", "--reservation=tests", "--constraint=tested", "--time=1-06:00:00"),
    *("--cpus-per-task=4", "--mem=2G", "--gpu-request=gres", "--gpu-type=h100", "--sbatch=--comment=a 'long' one"),
)


@pytest.fixture
def reserved(slurm: Slurm) -> Iterator[None]:
    """A reservation of the name tests, of tomorrow."""
    times = ("starttime=tomorrow", "duration=1:00:00")
    slurm.run("scontrol", "create", "reservation", "reservationname=tests", *times, "users=root", "nodes=ALL")
    yield
    slurm.tidy()
    slurm.run("scontrol", "delete", "reservationname=tests")


def held(launcher: Launcher, directory: Path, *arguments: str) -> list[dict[str, str]]:
    """What the controller says of a job that is submitted and held."""
    job = launcher.launch(f"run.dir={directory}", "--sbatch=--hold", *arguments)
    return launcher.slurm.jobs(job[0])


def test_a_job_of_whole_nodes_with_gpus(launcher: Launcher, tmp_path: Path) -> None:
    (job,) = held(launcher, tmp_path / "run", *GPUS, "rollout.devices=8-15", "--exclusive")
    assert (job["NumNodes"], job["TresPerNode"], job["NtasksPerN:B:S:C"]) == ("2-2", "gres:gpu:8", "1:0:*:*")
    assert (job["OverSubscribe"], job["MinMemoryNode"], job["Requeue"]) == ("NO", "0", "1")
    assert job["StdOut"] == f"{tmp_path}/run/slurm/{job['JobId']}.out"
    assert job["JobName"] == "run"


def test_an_array_of_whole_jobs_passes_through(launcher: Launcher, tmp_path: Path) -> None:
    (job,) = held(launcher, tmp_path / "run", *GPUS, "rollout.devices=8-15", "--sbatch=--array=0-5%2")
    assert (job["ArrayTaskId"], job["ArrayTaskThrottle"]) == ("0-5%2", "2")
