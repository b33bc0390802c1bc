"""``megarl launch ray`` against a Ray cluster with a dashboard and a token."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml

from megarl.config import ConfigError, load
from megarl.errors import RunError
from megarl.launch import ray_job
from megarl.run.status.jobs import last_submission
from tests.config.debug import REPOSITORY
from tests.launch.ray_head import DEVICES, ForwardedPort, RayHead
from tests.launch.slurm_command import finish
from tests.leftovers import comes_true

pytestmark = pytest.mark.process

SFT = REPOSITORY / "configs" / "debug" / "sft.yaml"
LIMIT_S = 280


@pytest.mark.parametrize(
    "address",
    [
        *("10.0.0.1:8265", "ray://10.0.0.1:10001", "auto", "http://"),
        *("http://h:99999", "http://h:abc", "http://h:0", "http://[::1"),
    ],
)
def test_another_address_than_the_dashboards_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="http://HEAD:8265"):
        ray_job.launch(SFT, [], address=address)


def test_a_package_has_the_files_and_the_resolved_configuration(tmp_path: Path) -> None:
    for name in ("rewards.py", "data/rows.jsonl", ".git/config", ".hidden", "data/__pycache__/rewards.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    config = load(SFT, ["run.steps=7"])
    with ray_job.packed(tmp_path, config) as package, ZipFile(package) as archive:
        (resolved,) = set(archive.namelist()) - {"rewards.py", "data/rows.jsonl"}
        assert len(archive.namelist()) == 3
        assert archive.read("data/rows.jsonl") == b"data/rows.jsonl"
        assert yaml.safe_load(archive.read(resolved))["run"]["steps"] == 7


def test_a_large_directory_is_not_uploaded(tmp_path: Path) -> None:
    for name, size_mib in {"small.py": 1, "runs/one": 60, "runs/two": 45}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        with (tmp_path / name).open("wb") as file:
            file.truncate(size_mib << 20)
    with pytest.raises(ConfigError, match=r"runs: 105 MiB, small\.py: 1 MiB"), ray_job.packed(tmp_path, load(SFT)):
        pass


def test_a_run_of_an_uploaded_directory_writes_elsewhere(tmp_path: Path) -> None:
    shutil.copytree(REPOSITORY / "configs", tmp_path / "configs")
    with pytest.raises(ConfigError, match=r"run\.dir = runs/mine"):
        ray_job.launch(SFT, ["run.dir=runs/mine"], address="http://127.0.0.1:1", working_dir=tmp_path)


def test_a_finished_run_is_not_submitted(tmp_path: Path) -> None:
    finish(tmp_path / "done", stage="sft")
    with pytest.raises(ConfigError, match="has taken its 3 steps"):
        ray_job.launch(SFT, [f"run.dir={tmp_path}/done", "run.steps=3"], address="http://127.0.0.1:1")
    with pytest.raises(RunError, match="nothing listens there"):
        ray_job.launch(SFT, [f"run.dir={tmp_path}/done", "run.steps=4"], address="http://127.0.0.1:1")


def test_an_address_without_a_dashboard_is_reported_with_a_fix(tmp_path: Path) -> None:
    shutil.copytree(REPOSITORY / "configs", tmp_path / "configs")
    with pytest.raises(RunError, match=r"127\.0\.0\.1:1: nothing listens there .* ray start --head --dashboard-host"):
        ray_job.launch(SFT, [f"run.dir={tmp_path}"], address="http://127.0.0.1:1", working_dir=tmp_path)


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as directory, RayHead(Path(directory)) as started:
        yield started


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """In place of the job's Python: a program that prints its arguments and then follows the test's script."""
    program = tmp_path / "stand-in"
    program.write_text(f'#!/bin/bash\necho "in $PWD: $*"\nsource {tmp_path}/then\n')
    program.chmod(0o755)
    return program


def ended(program: subprocess.Popen[str]) -> tuple[int, str, str]:
    output, errors = program.communicate(timeout=LIMIT_S)
    return program.returncode, output, errors


def printed_until(program: subprocess.Popen[str], last: str) -> str:
    """What it prints, up to this line."""
    assert program.stdout is not None
    lines = [program.stdout.readline()]
    while lines[-1] not in (last, ""):
        lines.append(program.stdout.readline())
    assert lines[-1] == last, program.communicate()
    return "".join(lines)


@pytest.mark.e2e
def test_an_unsuitable_cluster_is_reported_with_a_fix(head: RayHead, tmp_path: Path) -> None:
    stranger = {name: value for name, value in head.environment.items() if not name.startswith("RAY_AUTH")}
    status, _, errors = ended(head.launch(SFT, f"run.dir={tmp_path}", environment=stranger))
    assert (status, errors.count("\n")) == (1, 1)
    assert "the cluster wants its token: export RAY_AUTH_MODE=token" in errors
    status, _, errors = ended(head.launch(SFT, f"run.dir={tmp_path}", "cluster.nodes=2"))
    assert (status, errors.count("\n")) == (1, 1)
    assert f"the run needs 2 x {DEVICES} devices" in errors
    assert "ray start --resources '{\"device\": 4}'" in errors
    assert not list(tmp_path.iterdir())
    status, _, errors = ended(head.launch(SFT, "run.dir=/proc/none"))
    assert status == 2
    assert errors.startswith("command line: 1 problem\n  run.dir = /proc/none\n    rule: can be written (No such file")


@pytest.mark.e2e
@pytest.mark.parametrize(("then", "code"), [("exit 7", 7), ("kill -KILL $$", 137)])
def test_the_command_has_the_jobs_exit_code(
    head: RayHead, tmp_path: Path, stand_in: Path, then: str, code: int
) -> None:
    (tmp_path / "then").write_text(then)
    run_dir = tmp_path / "a run"
    status, output, errors = ended(head.launch(SFT, f"run.dir={run_dir}", "run.steps=9", "--python", stand_in))
    assert (status, errors) == (code, "")
    (file,) = run_dir.glob("ray/config-*.yaml")
    assert f"in {REPOSITORY}: -m megarl train {file}\n" in output
    sent = yaml.safe_load(file.read_text())
    assert (sent["run"]["steps"], sent["cluster"]["address"]) == (9, "auto")


@pytest.mark.e2e
def test_sigterm_stops_the_job_and_waits_for_its_end(head: RayHead, tmp_path: Path, stand_in: Path) -> None:
    # Longer than the 3 s that Ray gives a job by itself.
    (tmp_path / "then").write_text("trap 'sleep 4; echo gone; exit 143' TERM; echo up; while true; do sleep 0.1; done")
    program = head.launch(SFT, f"run.dir={tmp_path}", "--python", stand_in)
    printed_until(program, "up\n")
    program.send_signal(signal.SIGTERM)
    status, after, errors = ended(program)
    assert (status, errors) == (128 + signal.SIGTERM, "")
    lines = after.splitlines()
    assert "stopping megarl-" in lines[0]
    assert lines[-1] == "gone"
    assert "up" not in lines, "what was printed is not printed again"


@pytest.mark.e2e
def test_a_second_interrupt_does_not_wait(head: RayHead, tmp_path: Path, stand_in: Path) -> None:
    (tmp_path / "then").write_text(f"trap '' TERM; echo up; until [ -e {tmp_path}/go ]; do sleep 0.1; done")
    program = head.launch(SFT, f"run.dir={tmp_path}", "--python", stand_in)
    printed_until(program, "up\n")
    program.send_signal(signal.SIGINT)
    assert program.stdout is not None
    while "a second signal does not wait for it" not in (line := program.stdout.readline()):
        assert line, program.communicate()
    program.send_signal(signal.SIGINT)
    status, _, errors = ended(program)
    assert status == 1
    assert "may go on: ray job stop megarl-" in errors
    (tmp_path / "go").touch()


@pytest.mark.e2e
def test_a_lost_connection_is_reestablished(head: RayHead, tmp_path: Path, stand_in: Path) -> None:
    (tmp_path / "then").write_text(f"echo up; until [ -e {tmp_path}/go ]; do sleep 0.1; done; echo down; exit 7")
    with ForwardedPort(head.address) as port:
        program = head.launch(SFT, f"run.dir={tmp_path}", "--python", stand_in, address=port.address)
        before = printed_until(program, "up\n")
        port.cut()
        (tmp_path / "go").touch()
        status, after, errors = ended(program)
    assert (status, errors) == (7, "")
    assert [line for line in (before + after).splitlines() if line in ("up", "down")] == ["up", "down"]


@pytest.mark.e2e
def test_a_job_continues_without_its_submitter(head: RayHead, tmp_path: Path, stand_in: Path) -> None:
    (tmp_path / "then").write_text(f"until [ -e {tmp_path}/go ]; do sleep 0.1; done; touch {tmp_path}/done")
    status, output, _ = ended(head.launch(SFT, f"run.dir={tmp_path}", "--python", stand_in, "--no-wait"))
    assert status == 0
    assert f"--address {head.address} --follow" in output
    assert not (tmp_path / "done").exists()
    submission = last_submission(tmp_path)
    assert submission is not None
    assert f"submitted {submission.job} to" in output
    (tmp_path / "go").touch()
    deadline = time.monotonic() + LIMIT_S
    while not (tmp_path / "done").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.e2e
def test_an_uploaded_directory_runs_from_its_copy_and_other_paths_are_the_clusters(
    head: RayHead, tmp_path: Path
) -> None:
    shutil.copytree(REPOSITORY / "configs", tmp_path / "sent" / "configs")
    elsewhere = tmp_path / "elsewhere"
    arguments = [SFT, f"run.dir={elsewhere}", "data.evaluation=/cluster/rows.jsonl", "--working-dir", tmp_path / "sent"]
    python = Path(sys.executable)
    status, output, _ = ended(head.launch(*arguments, "--python", python))
    assert status == 2
    problems = output.partition("megarl-run.yaml: ")[2]
    assert problems.startswith("1 problem\n  data.evaluation = /cluster/rows.jsonl\n")
    assert not elsewhere.exists()


@pytest.mark.e2e
def test_a_run_on_the_clusters_devices(head: RayHead, tmp_path: Path) -> None:
    two = ("groups.train.devices=0-1", "groups.train.roles.actor.pp=1")
    status, output, errors = ended(head.launch(SFT, f"run.dir={tmp_path}", "run.steps=2", *two))
    assert (status, errors) == (0, ""), output
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2]
    assert (tmp_path / "export" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("ends", "resumes", "code", "starts"), [("75 75 0", 3, 0, 3), ("75 75 0", 1, 75, 2), ("1", 3, 1, 1)]
)
def test_a_job_starts_its_run_again_after_it_has_left(
    tmp_path: Path, ends: str, resumes: int, code: int, starts: int
) -> None:
    (tmp_path / "ends").write_text(ends.replace(" ", "\n"))
    run = f"cd {tmp_path}; echo >> starts; exit $(sed -n $(wc -l < starts)p ends)"
    job = ray_job.resuming(["sh", "-c", run], resumes)
    assert subprocess.run(["sh", "-c", job], check=False).returncode == code
    assert (tmp_path / "starts").read_text() == "\n" * starts


def test_a_stopped_job_does_not_start_its_run_again(tmp_path: Path) -> None:
    run = f"trap 'exit 75' TERM; echo up >> {tmp_path}/starts; while true; do sleep 0.05; done"
    with subprocess.Popen(["sh", "-c", ray_job.resuming(["sh", "-c", run], 3)], start_new_session=True) as job:
        assert comes_true((tmp_path / "starts").exists)
        os.killpg(job.pid, signal.SIGTERM)  # as Ray does
        assert job.wait(LIMIT_S) == 75
    assert (tmp_path / "starts").read_text() == "up\n"
