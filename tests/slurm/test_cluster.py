"""The Slurm that the tests start is a real one of two nodes, and leaves nothing."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.leftovers import Trace
from tests.slurm.cluster import Slurm, SlurmError
from tests.slurm.daemons import Daemon, DaemonError

pytestmark = [pytest.mark.process, pytest.mark.e2e]

ALL_OF_SLURM = {"munged", "mariadbd", "slurmdbd", "slurmctld", "slurmd", "slurmstepd"}


def lines(path: Path) -> list[str]:
    return sorted(path.read_text().splitlines())


def processes_of(slurm: Slurm) -> set[str]:
    """Names of the living processes that were told of a Slurm's directory."""
    told: set[str] = set()
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if str(slurm.directory).encode() in (entry / "environ").read_bytes():
                told.add((entry / "comm").read_text().strip())
    return told


def test_a_step_has_a_task_on_every_node(slurm: Slurm, tmp_path: Path) -> None:
    job = slurm.submit("srun printenv SLURMD_NODENAME", "--nodes=2", "-o", tmp_path / "out")
    slurm.wait(job, "COMPLETED")
    assert lines(tmp_path / "out") == ["n1", "n2"]
    assert slurm.accounted(job)[f"{job}.0"] == ("COMPLETED", "0:0")


def test_the_tasks_of_an_array_run_beside_each_other(slurm: Slurm, tmp_path: Path) -> None:
    both = f'touch {tmp_path}/$SLURM_ARRAY_TASK_ID; while [ "$(ls {tmp_path} | wc -l)" != 2 ]; do sleep 0.1; done'
    job = slurm.submit(both, "--array=0-1", "-o", "/dev/null")
    assert [task["ArrayTaskId"] for task in slurm.wait(job, "COMPLETED")] == ["1", "0"]


def test_a_dependent_job_starts_only_after_success(slurm: Slurm, tmp_path: Path) -> None:
    first = slurm.submit(f"sleep 1; echo first >> {tmp_path}/told", "-o", "/dev/null")
    second = slurm.submit(f"echo second >> {tmp_path}/told", "-o", "/dev/null", f"--dependency=afterok:{first}")
    slurm.wait(second, "COMPLETED")
    assert (tmp_path / "told").read_text() == "first\nsecond\n"

    first = slurm.submit("exit 3", "-o", "/dev/null")
    second = slurm.submit("true", "-o", "/dev/null", f"--dependency=afterok:{first}", "--kill-on-invalid-dep=yes")
    assert slurm.wait(first, "FAILED")[0]["ExitCode"] == "3:0"
    slurm.wait(second, "CANCELLED")


def test_devices_are_counted(slurm: Slurm, tmp_path: Path) -> None:
    job = slurm.submit("srun printenv SLURM_GPUS_ON_NODE", "--gpus-per-node=8", "-o", tmp_path / "out")
    slurm.wait(job, "COMPLETED")
    assert lines(tmp_path / "out") == ["8"]
    with pytest.raises(SlurmError, match="node configuration is not available"):
        slurm.submit("true", "--gpus-per-node=9")


def test_a_job_on_a_failed_node_ends_and_the_node_recovers(slurm: Slurm, tmp_path: Path) -> None:
    trace = Trace()
    job = slurm.submit(
        f"srun bash -c 'touch {tmp_path}/$SLURMD_NODENAME; sleep 1000'",
        *("--nodes=2", "--no-requeue", "-o", tmp_path / "out"),
        environment=slurm.environment(**trace.environment()),
    )
    while not ((tmp_path / "n1").exists() and (tmp_path / "n2").exists()):
        time.sleep(0.1)
    slurm.kill_node("n2")
    slurm.wait(job, "NODE_FAIL")
    assert "Node failure on n2" in (tmp_path / "out").read_text()
    slurm.tidy()
    assert trace.processes() == []


def test_a_second_cluster_leaves_nothing_behind() -> None:
    with Slurm() as second:
        second.submit("sleep 1000", "-o", "/dev/null")
        deadline = time.monotonic() + 60
        while not processes_of(second) >= ALL_OF_SLURM and time.monotonic() < deadline:
            time.sleep(0.1)
        assert processes_of(second) >= ALL_OF_SLURM
    assert processes_of(second) == set()
    assert not second.directory.exists()


def test_a_daemon_that_does_not_start_is_named_with_its_log(tmp_path: Path) -> None:
    daemon = Daemon(("bash", "-c", "echo no such key; exit 1"), log=tmp_path / "munged.log", environment={})
    daemon.start()
    with pytest.raises(DaemonError) as told:
        daemon.wait(lambda: "silent", "ready")
    assert str(told.value) == "munged ended before it was ready: silent\nThe end of munged.log:\n  no such key"
