"""Experiments of NeMo-Run on a real Slurm: options of the jobs, their ends, and messages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from tests.launchers.scripts import ROOT, UMASK, User, user
from tests.leftovers import comes_true
from tests.random_models import place_random_model
from tests.slurm.cluster import Slurm
from tests.slurm.jobs import Launcher

pytestmark = [pytest.mark.process, pytest.mark.e2e]

NASTY = 'it\'s $HOME `id` "two" {{ words }} #& \\ * %j é'
_PROFILE = {
    "partition": "all",
    "exclusive": False,  # jobs share the two nodes
    "cpus_per_task": 8,
    "time": "00:20:00",
    "start_limit": 240,
    "env": {"OMP_NUM_THREADS": 1, "nasty": NASTY},
    "setup": ['export ADDED="$nasty!"'],
    "sbatch": ['--comment=it\'s "this" test'],
}


def options(directory: Path, python: Path) -> list[str]:
    """Options of a script, the profile among them."""
    profile = directory / "profile.yaml"
    profile.write_text(yaml.safe_dump({**_PROFILE, "runtime": {"python": str(python)}}))
    return ["--executor=slurm", "--profile", str(profile), "--name=demo"]


def stage(directory: Path, name: str, text: str) -> str:
    """The file of a stage whose run.dir is called like it."""
    file = directory / f"{name}.yaml"
    base = ROOT / "configs" / "debug" / f"{name}.yaml"
    file.write_text(f"defaults: [{base}]\nrun: {{dir: {directory / name}, steps: 2}}\n{text}")
    return str(file)


def two_stages(directory: Path) -> list[str]:
    """Two stages on both nodes; their training results do not matter."""
    cluster = "cluster: {nodes: 2, devices_per_node: 1}\ngroups: {train: {devices: 0-1, roles: {ROLE: {tp: 2, pp: 1}}}}"
    roles = {"sft": "actor", "reward_model": "reward"}
    return [stage(directory, name, cluster.replace("ROLE", role)) for name, role in roles.items()]


@pytest.fixture
def login(slurm: Slurm, tmp_path: Path) -> User:
    """A user of NeMo-Run on a login node."""
    misleading = {"SBATCH_PARTITION": "nowhere", "SBATCH_TIMELIMIT": "1", "SLURM_JOB_ID": "1", "SLURM_NTASKS": "7"}
    return user(tmp_path, **slurm.environment(**misleading))


def test_jobs_get_the_requested_options(login: User, slurm: Slurm) -> None:
    files = two_stages(login.directory)
    done = login.call("pipeline", *files, "run.seed=7", *options(login.directory, login.stand_in))
    assert done.returncode == 0, done.stderr
    calls = login.calls
    assert [call["stage"] for call in calls] == ["sft", "sft", "reward_model", "reward_model"]
    for call in calls:
        (config,) = login.directory.glob(f"{call['stage']}/slurm/config-*.yaml")
        assert call["arguments"] == ["-m", "megarl.launch.node", "--start-limit", "240", "train", str(config)]
        assert yaml.safe_load(call["config"])["run"]["seed"] == 7
        assert call["at"] == str(ROOT)
        assert call["environment"]["nasty"] == NASTY
        assert call["environment"]["ADDED"] == f"{NASTY}!"
        assert call["umask"] == UMASK
    assert login.readable == []
    nodes = [call["environment"]["SLURM_NODEID"] for call in calls]
    assert sorted(nodes[:2]) == sorted(nodes[2:]) == ["0", "1"]
    secrets = [call["environment"]["RAY_AUTH_TOKEN"] for call in calls]
    assert secrets[0] == secrets[1] != secrets[2] == secrets[3]
    assert all(len(secret) == 64 for secret in secrets)
    (login.directory / "calls.jsonl").unlink()
    written = [file.read_bytes() for file in login.directory.rglob("*") if file.is_file()]
    assert not [text for text in written if any(secret.encode() in text for secret in secrets)]
    for call in calls:
        (job,) = slurm.jobs(int(call["environment"]["SLURM_JOB_ID"]))
        assert (job["Partition"], job["TimeLimit"]) == ("all", "00:20:00")
        assert (job["JobState"], job["Requeue"], job["JobName"]) == ("COMPLETED", "1", f"demo.{call['stage']}")


def test_dependents_of_a_failed_job_are_cancelled(login: User) -> None:
    login.let("sft", fail=True)
    done = login.call("pipeline", *two_stages(login.directory), *options(login.directory, login.stand_in))
    assert done.returncode == 1
    assert {call["stage"] for call in login.calls} == {"sft"}
    assert f"sft: FAILED; see megarl status {login.directory / 'sft'}" in done.stderr
    assert "reward_model: CANCELLED; its run has not started" in done.stderr


def test_a_job_whose_run_leaves_is_waited_for_to_its_end(login: User) -> None:
    login.let("sft", leave=True)
    done = login.call("ppo", two_stages(login.directory)[0], *options(login.directory, login.stand_in))
    assert done.returncode == 0, done.stderr
    restarts = [call["environment"].get("SLURM_RESTART_COUNT") for call in login.calls]
    assert restarts == [None, None, "1", "1"]


def test_a_refusal_by_sbatch_is_reported(login: User) -> None:
    done = login.call(
        "ppo", two_stages(login.directory)[0], *options(login.directory, login.stand_in), "--partition=no"
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "sbatch: error: " in done.stderr
    assert "sbatch" not in done.stdout, "it is told once"
    assert login.calls == []


@pytest.mark.matrix
def test_jobs_left_running_are_reported_and_cancelled(login: User, slurm: Slurm) -> None:
    login.let("sft", stay=True)
    files = two_stages(login.directory)
    done = login.call("pipeline", *files, "--detach", *options(login.directory, login.stand_in))
    assert done.returncode == 0, done.stderr
    assert comes_true(lambda: len(login.calls) == 2, 90), "the first job starts"
    job = int(login.calls[0]["environment"]["SLURM_JOB_ID"])
    assert comes_true(lambda: "Status: RUNNING" in login.nemo("status", "demo"), 90)
    login.nemo("cancel", "demo", "--all")
    slurm.wait(job, "CANCELLED")
    slurm.wait(job + 1, "CANCELLED")
    assert comes_true(lambda: login.nemo("status", "demo").count("Status: CANCELLED") == 2, 90)
    assert "the stand-in runs sft" in login.nemo("logs", "demo", "0")


@pytest.mark.matrix
def test_a_pipeline_trains_on_the_model_of_the_stage_before(launcher: Launcher, tmp_path: Path) -> None:
    """tests/sort_letters/test_whole.py has the third stage."""
    model = f"model: {{random: null, path: {tmp_path / 'sft' / 'export'}}}\n"
    unscaled = "normalisation: null\nrollout: null\n"  # of which the first needs the other, an engine
    one = "cluster: {devices_per_node: 1}\ngroups: {train: {devices: 0, roles: {reward: {tp: 1, pp: 1}}}}\n"
    files = [two_stages(tmp_path)[0], stage(tmp_path, "reward_model", model + unscaled + one)]
    place_random_model(Path(files[0]))
    login = user(tmp_path, **launcher.environment)
    done = login.call("pipeline", *files, *options(tmp_path, Path(sys.executable)), limit_s=800)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("sft", "reward_model"):
        assert (tmp_path / name / "export" / "config.json").exists()
        assert "finished" in launcher.megarl("status", str(tmp_path / name)).stdout
