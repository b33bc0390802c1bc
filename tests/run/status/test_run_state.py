"""The state of a run, from directories after various ends."""

from __future__ import annotations

import fcntl
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from megarl.run.directory import RunDirectory
from megarl.run.paths import is_locked
from megarl.run.status.reading import read_status
from megarl.run.status.run_state import RunState
from tests.config.debug import debug
from tests.run.status.directories import MINUTE, NOW, MadeRun


@pytest.fixture
def run(tmp_path: Path) -> MadeRun:
    return MadeRun(tmp_path / "run")


def state(run: MadeRun, host: str = "n1") -> RunState:
    return read_status(run.path, NOW, host).state


@contextmanager
def held(run: MadeRun) -> Iterator[None]:
    with (run.path / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.mark.parametrize("host", ["n1", "login"])
def test_a_process_that_holds_the_lock_is_running(run: MadeRun, host: str) -> None:
    run.start(1, ago=9000)
    run.steps(3, ago=8000, apart=60)
    with held(run):
        assert state(run, host).name == "running"
        (run.path / "attempts.jsonl").unlink()
        assert state(run, host).name == "running"


def test_a_summary_means_finished(run: MadeRun) -> None:
    run.start(1, ago=900)
    run.end(1, ago=60, step=100, reason="finished")
    (run.path / "summary.json").write_text("{}")
    assert state(run) == RunState(name="finished", because="summary.json is there", since=NOW - 60)


@pytest.mark.parametrize(
    ("reason", "name"),
    [
        ("interrupted", "interrupted"),
        ("preempted", "preempted"),
        ("config error", "failed"),
        ("run error", "failed"),
        ("exception", "failed"),
        ("finished", "finished"),
        ("profiled", "profiled"),
    ],
)
def test_a_recorded_end_is_reported(run: MadeRun, reason: str, name: str) -> None:
    run.start(1, ago=900)
    run.end(1, ago=800, step=1, reason="exception", message="another one")
    run.start(2, ago=700)
    run.end(2, ago=60, step=7, reason=reason, message="train rank 3 died")
    found = state(run, "login")
    assert (found.name, found.since) == (name, NOW - 60)
    assert found.message == ("" if reason in ("finished", "profiled") else "train rank 3 died")


def test_a_process_missing_on_this_machine_was_killed(run: MadeRun) -> None:
    run.start(1, ago=900)
    run.steps(3, ago=300, apart=60)
    found = state(run)
    assert (found.name, found.since) == ("killed", NOW - 300)
    assert "process 77 on n1 wrote no reason" in found.message


@pytest.mark.process
def test_a_killed_process_is_distinguished_from_a_running_one(tmp_path: Path) -> None:
    path = MadeRun(tmp_path / "run").path
    code = f"""
import fcntl, pathlib
from megarl.run.attempts import AttemptLog
run = pathlib.Path({str(path)!r})
lock = (run / ".lock").open("a")
fcntl.flock(lock, fcntl.LOCK_EX)
AttemptLog(run / "attempts.jsonl").start(0)
print("started", flush=True)
input()
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"started\n"
        assert read_status(path).state.name == "running"
    finally:
        process.kill()
        process.communicate()
    found = read_status(path)
    assert found.state.name == "killed"
    assert f"process {process.pid} on {socket.gethostname()} " in found.state.message


@pytest.mark.parametrize(("apart", "ago", "name"), [(60, 500, "running"), (60, 700, "silent"), (900, 2600, "running")])
def test_the_state_of_a_process_on_another_machine_comes_from_its_files(
    run: MadeRun, apart: float, ago: float, name: str
) -> None:
    run.start(1, ago=9000)
    run.steps(3, ago=ago, apart=apart)
    found = state(run, "login")
    assert found.name == name
    assert found.because.endswith("login cannot see the processes of n1")
    assert found.because.startswith("last written ")


@pytest.mark.parametrize(("ago", "name"), [(25 * MINUTE, "running"), (35 * MINUTE, "silent")])
def test_a_process_loading_its_model_is_not_silent(run: MadeRun, ago: float, name: str) -> None:
    run.start(1, ago=ago)
    assert state(run, "login").name == name


def test_an_unsupported_lock_is_ignored(run: MadeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    run.start(1, ago=60)
    monkeypatch.setattr(fcntl, "flock", unsupported)
    assert is_locked(run.path / ".lock") is None
    assert state(run) == RunState(name="running", because="last written 60 s ago; its lock cannot be read")


def test_a_jobs_end_explains_a_driver_that_wrote_none(run: MadeRun) -> None:
    run.start(1, ago=900, job="4711", restart=1)
    run.steps(3, ago=300, apart=60)
    end = {"exit_code": 1, "reason": "node n2 was lost: its agent is gone", "node": "n2"}
    run.job("4711-0", {"agent started": 5000}, {"exit_code": 0, "reason": "finished", "node": None})
    run.job("4711-1", {"agent started": 1000, "driver started": 910}, end)
    found = state(run, "login")
    assert (found.name, found.message) == ("killed", "node n2 was lost: its agent is gone")
    assert found.because == "job 4711 has ended with exit code 1"


@pytest.mark.parametrize(("code", "name"), [(1, "failed"), (143, "interrupted")])
def test_the_jobs_reason_for_an_interrupt_is_shown(run: MadeRun, code: int, name: str) -> None:
    run.start(1, ago=900, job="4711")
    run.end(1, ago=90, step=3, reason="interrupted", message="SIGTERM")
    run.job("4711-0", {"agent started": 1000}, {"exit_code": code, "reason": "why it was", "node": None})
    assert (state(run).name, state(run).message) == (name, "why it was")


def test_the_drivers_cause_takes_precedence_over_the_exit_code(run: MadeRun) -> None:
    run.start(1, ago=900, job="4711")
    run.end(1, ago=90, step=3, reason="run error", message="train rank 3 died")
    run.job("4711-0", {"agent started": 1000}, {"exit_code": 1, "reason": "the driver exited with 1", "node": None})
    assert state(run).message == "train rank 3 died"


def test_a_lost_node_takes_precedence_over_the_drivers_cause(run: MadeRun) -> None:
    run.start(1, ago=900, job="4711")
    run.end(1, ago=90, step=3, reason="run error", message="train rank 3 died in update\nits log is logs/rank-3.log")
    end = {"exit_code": 1, "reason": "node n2 was lost: the connection to its agent has ended", "node": "n2"}
    run.job("4711-0", {"agent started": 1000}, end)
    message = "node n2 was lost: the connection to its agent has ended\ntrain rank 3 died in update\n"
    assert state(run, "login") == RunState(
        name="failed",
        because="its last attempt ended: run error",
        message=f"{message}its log is logs/rank-3.log",
        since=NOW - 90,
    )


def test_a_cancelled_job_interrupts_a_run_whose_processes_ended_before_its_driver(run: MadeRun) -> None:
    run.start(1, ago=900, job="4711")
    run.end(1, ago=90, step=3, reason="run error", message="train rank 3 died")
    end = {"exit_code": 143, "reason": "node n1 got SIGTERM", "node": None}
    run.job("4711-0", {"agent started": 1000}, end)
    assert (state(run).name, state(run).message) == ("interrupted", "node n1 got SIGTERM\ntrain rank 3 died")


def test_a_lost_node_of_another_job_is_ignored(run: MadeRun) -> None:
    run.job("4711-0", {"agent started": 1000}, {"exit_code": 1, "reason": "node n2 was lost", "node": "n2"})
    run.start(1, ago=300)
    run.end(1, ago=90, step=3, reason="run error", message="train rank 3 died")
    assert state(run).message == "train rank 3 died"


STAGES = {"agent started": 60.0, "all connected": 30.0}


def test_a_job_whose_run_has_not_resumed_yet_is_starting(run: MadeRun) -> None:
    run.start(1, ago=900, job="4711")
    run.end(1, ago=90, step=3, reason="interrupted", message="SIGTERM")
    run.job("4712-0", STAGES)
    assert state(run) == RunState(name="starting", because="job 4712: all connected 30 s ago")


def test_a_job_that_ended_before_its_run_began_has_a_reason(run: MadeRun) -> None:
    (run.path / "config.yaml").unlink()
    run.job("4712-0", STAGES, {"exit_code": 1, "reason": "node n2 did not come within 600 s", "node": "n2"})
    (run.path / "slurm" / "config-0123abcd.yaml").write_text("stage: sft\nrun: {steps: 7}\n")
    found = read_status(run.path, NOW, "login")
    assert (found.state.name, found.state.message) == ("failed", "node n2 did not come within 600 s")
    assert (found.stage, found.progress.step, found.progress.steps) == ("sft", 0, 7)


@pytest.mark.parametrize(("ago", "name"), [(25 * MINUTE, "starting"), (35 * MINUTE, "silent")])
def test_a_job_without_progress_is_silent(run: MadeRun, ago: float, name: str) -> None:
    run.job("4712-0", {"agent started": ago + 5000, "all connected": ago})
    found = state(run, "login")
    assert (found.name, found.because) == (name, f"job 4712: all connected {ago / MINUTE:.0f} min ago")


@pytest.mark.parametrize(
    ("apart", "ago", "name"), [(60, 500, "starting"), (60, 700, "silent"), (900, 2600, "starting")]
)
def test_a_job_that_resumes_a_run_is_silent_only_after_the_runs_step_times(
    run: MadeRun, apart: float, ago: float, name: str
) -> None:
    run.start(1, ago=90000, job="4711")
    run.steps(3, ago=80000, apart=apart)
    run.end(1, ago=79000, step=3, reason="interrupted", message="SIGTERM")
    run.job("4712-0", {"agent started": ago})
    assert state(run, "login").name == name


def test_a_job_without_a_started_agent_shows_its_output(run: MadeRun) -> None:
    run.file("slurm/config-0.yaml", ago=100)
    run.file("slurm/4711.out", ago=101, text="of a job before\n")
    assert state(run).name == "waiting"
    run.file("slurm/4712.out", ago=90, text="a\nb\n\n\x1b[31mc\r\nsetup: module load cuda/12.8: exit code 127\n")
    known = "job 4712: it printed this 90 s ago, and nothing else is known; squeue --job 4712 shows whether it runs"
    printed = "b\n[31mc\nsetup: module load cuda/12.8: exit code 127"
    assert state(run) == RunState(name="starting", because=known, message=printed)
    run.file("slurm/4712.out", ago=35 * MINUTE)
    run.file("slurm/config-0.yaml", ago=36 * MINUTE)
    assert state(run).name == "silent"
    assert state(run).because.startswith("job 4712: it began 35 min ago, and nothing else is known; ")


REFUSED = {"exit_code": 2, "reason": "run.dir = runs/x is run by one process at a time", "node": None}


@pytest.mark.parametrize("host", ["n1", "login"])
def test_a_refused_job_does_not_change_the_state_of_a_running_run(run: MadeRun, host: str) -> None:
    run.start(1, ago=900, job="4711")
    run.job("4711-0", {"agent started": 1000})
    run.job("4712-0", {"agent started": 400}, REFUSED, ago=380)
    run.steps(3, ago=60, apart=60)
    with held(run):
        found = read_status(run.path, NOW, host)
    assert (found.state.name, found.job and found.job.id, found.newer and found.newer.id) == ("running", "4711", "4712")
    found = read_status(run.path, NOW, "login")
    assert (found.state.name, found.job and found.job.id) == ("running", "4711")
    run.end(1, ago=30, step=4, reason="run error", message="train rank 3 died")
    found = read_status(run.path, NOW, "login")
    assert (found.state.name, found.state.message) == ("failed", "train rank 3 died")
    run.job("4713-0", {"agent started": 20}, REFUSED, ago=10)
    found = read_status(run.path, NOW, "login")
    assert (found.state.because, found.newer) == ("job 4713 has ended with exit code 2", None)


def test_a_finished_run_ignores_later_jobs(run: MadeRun) -> None:
    run.start(1, ago=900, job="4711")
    run.end(1, ago=60, step=100, reason="finished")
    (run.path / "summary.json").write_text("{}")
    run.job("4711-0", {"agent started": 1000})
    run.job("4712-0", {"agent started": 30}, REFUSED)
    found = read_status(run.path, NOW, "login")
    assert (found.state.name, found.job and found.job.id) == ("finished", "4711")
    assert (found.newer and found.newer.id) == "4712"


def test_a_submitted_run_that_has_not_started_is_waiting(run: MadeRun) -> None:
    assert state(run).name == "waiting"


def test_a_run_without_attempts_has_an_unknown_state(run: MadeRun) -> None:
    run.steps(3, ago=300, apart=60)
    assert state(run) == RunState(name="unknown", because="no record of who ran it; last written 5 min ago")


def test_reading_the_lock_does_not_block_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looking = (tmp_path / ".lock").open("w")
    fcntl.flock(looking, fcntl.LOCK_SH)
    monkeypatch.setattr("time.sleep", lambda seconds: looking.close())
    with closing(RunDirectory(debug(f"run.dir={tmp_path}"))):
        assert looking.closed
        assert is_locked(tmp_path / ".lock")
    assert is_locked(tmp_path / ".lock") is False
