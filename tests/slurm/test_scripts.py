"""The scripts on a real Slurm: options, one task per node, exit codes, signals."""

from __future__ import annotations

import json
import sys
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from megarl.launch.render import render
from tests.launch.scripts import job
from tests.slurm.cluster import Slurm

pytestmark = [pytest.mark.process, pytest.mark.e2e]

NASTY = 'it\'s $HOME `id` "two"  words; #& é'
_PROGRAM = f"""#!{sys.executable}
import json, os, pathlib, signal, sys, time
told = {{"arguments": sys.argv[1:], "directory": os.getcwd(), "variables": dict(os.environ)}}
pathlib.Path(os.environ["RECORDS"], os.environ["SLURMD_NODENAME"]).write_text(json.dumps(told))
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
lasts, code = os.environ["PLAN"].split(",")[int(os.environ["SLURM_PROCID"])].split(":")
time.sleep(0 if "SLURM_RESTART_COUNT" in os.environ else float(lasts))
sys.exit(int(code))
"""


class Records:
    """A program in place of the interpreter that records the arguments of each task."""

    def __init__(self, directory: Path) -> None:
        self.at = directory / "records"
        self.at.mkdir()
        # Not in its own name: proctrack/linuxproc does not find a process to signal whose name has a space.
        self.program = directory / f"tools {NASTY}" / "program"
        self.program.parent.mkdir()
        self.program.write_text(_PROGRAM)
        self.program.chmod(0o755)

    def profile(self, plan: str, **more: Any) -> dict[str, Any]:
        """A profile with it; the plan has for each task how long it lasts at first, seconds, and its exit code."""
        usual = {"partition": None, "account": None, "exclusive": False, "time": "10", "grace": 0}
        own = {"RECORDS": str(self.at), "PLAN": plan, **more.pop("env", {})}
        return {**usual, "runtime": {"python": str(self.program)}, **more, "env": own}

    def read(self) -> dict[str, Any]:
        """By the name of the node."""
        return {file.name: json.loads(file.read_text()) for file in self.at.iterdir()}


@pytest.fixture
def records(tmp_path: Path) -> Records:
    return Records(tmp_path)


def submitted(slurm: Slurm, tmp_path: Path, profile: dict[str, Any], **changes: Any) -> int:
    """The id of a job of two nodes."""
    run_dir = tmp_path / NASTY
    (run_dir / "slurm").mkdir(parents=True)
    usual = {"workdir": tmp_path, "run_dir": run_dir, "nodes": 2, "gpus": 0}
    script = render(job(profile, **{**usual, **changes}))
    (run_dir / "slurm" / "job.sbatch").write_text(script)
    return int(slurm.run("sbatch", "--parsable", run_dir / "slurm" / "job.sbatch"))


def test_each_node_gets_the_arguments(slurm: Slurm, records: Records, tmp_path: Path) -> None:
    present = tmp_path / f"present {NASTY}"
    present.mkdir()
    profile = records.profile(
        "0:0,0:0",
        partition="all",
        exclusive=True,
        cpus_per_task=2,
        env={"GIVEN": NASTY},
        sbatch=[f"--comment={NASTY}", "--export=NONE"],
        setup=["export PATH=/usr/bin:/bin"],
    )
    number = submitted(slurm, tmp_path, profile, workdir=present, name=NASTY, gpus=8)
    slurm.wait(number, "COMPLETED")
    found = records.read()
    assert set(found) == {"n1", "n2"}
    for told in found.values():
        assert told["arguments"][-2:] == ["train", f"{tmp_path}/{NASTY}/slurm/config-0123abcd.yaml"]
        assert told["directory"] == str(present)
        assert told["variables"]["GIVEN"] == NASTY
        assert told["variables"]["SLURM_GPUS_ON_NODE"] == "8"
        assert told["variables"]["SLURM_CPUS_PER_TASK"] == "2"
    secrets = {told["variables"]["RAY_AUTH_TOKEN"] for told in found.values()}
    assert len(secrets) == 1
    shown = slurm.run("scontrol", "show", "job", str(number))
    assert f"JobName={NASTY}" in shown
    assert f"Comment={NASTY}" in shown
    assert "Requeue=1" in shown
    output = tmp_path / NASTY / "slurm" / f"{number}.out"
    assert output.read_text() == "srun: cluster configuration lacks support for cpu binding\n"


@pytest.mark.parametrize(("plan", "code"), [("0:7,1:0", 7), ("1:0,0:1", 1), ("1:2,0:0", 2)])
def test_the_job_has_the_worst_exit_code_of_its_tasks(
    slurm: Slurm, records: Records, tmp_path: Path, plan: str, code: int
) -> None:
    number = submitted(slurm, tmp_path, records.profile(plan))
    assert slurm.wait(number, "FAILED")[0]["ExitCode"] == f"{code}:0"


def test_a_run_that_leaves_before_the_time_limit_goes_on_in_its_job(
    slurm: Slurm, records: Records, tmp_path: Path
) -> None:
    number = submitted(slurm, tmp_path, records.profile("300:0,300:0", time="2", grace=85))
    (job,) = slurm.wait(number, "COMPLETED", limit_s=150)
    assert (job["Restarts"], job["ExitCode"]) == ("1", "0:0")
    for told in records.read().values():
        limit = datetime.fromtimestamp(int(told["variables"]["SLURM_JOB_END_TIME"]))
        assert limit - datetime.fromisoformat(job["StartTime"]) == timedelta(minutes=2)
    output = (tmp_path / NASTY / "slurm" / f"{number}.out").read_text()
    assert output.count("Exited with exit code 75") == 2


def test_a_run_that_is_not_to_go_on_ends_its_job(slurm: Slurm, records: Records, tmp_path: Path) -> None:
    number = submitted(slurm, tmp_path, records.profile("0:75,0:0", requeue=False))
    assert slurm.wait(number, "FAILED")[0]["ExitCode"] == "75:0"
