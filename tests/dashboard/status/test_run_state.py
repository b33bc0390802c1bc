"""The state of a run, from directories after various ends."""

from __future__ import annotations

import fcntl
from contextlib import closing
from pathlib import Path

import pytest

from megarl.dashboard.status.reading import RunState, read_status
from megarl.run.directory import RunDirectory
from megarl.run.paths import is_locked
from tests.config.debug import debug
from tests.dashboard.status.directories import MINUTE, NOW, MadeRun


@pytest.fixture
def run(tmp_path: Path) -> MadeRun:
    return MadeRun(tmp_path / "run")


def state(run: MadeRun, host: str = "n1") -> RunState:
    return read_status(run.path, NOW, host).state


@pytest.mark.parametrize("host", ["n1", "login"])
def test_a_process_that_holds_the_lock_is_running(run: MadeRun, host: str) -> None:
    run.start(1, ago=9000)
    run.steps(3, ago=8000, apart=60)
    with run.locked():
        assert state(run, host).name == "running"
        (run.path / "attempts.jsonl").unlink()
        assert state(run, host).name == "running"


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
    assert found.message == ("" if reason == "finished" else "train rank 3 died")


def test_a_process_missing_on_this_machine_was_killed(run: MadeRun) -> None:
    run.start(1, ago=900, job="7", restart=1)
    run.steps(3, ago=300, apart=60)
    found = state(run)
    assert (found.name, found.since) == ("killed", NOW - 300)
    assert "process 77 on n1 wrote no reason" in found.message
    (run.job("7-1") / "end.json").write_text('{"exit_code": 143, "reason": "node n1 got SIGTERM", "node": null}')
    assert state(run).message.endswith("its job ended: node n1 got SIGTERM")


@pytest.mark.parametrize(("ago", "name"), [(25 * MINUTE, "running"), (35 * MINUTE, "silent")])
def test_the_state_of_a_process_on_another_machine_comes_from_its_files(run: MadeRun, ago: float, name: str) -> None:
    run.steps(3, ago=ago, apart=60)
    assert state(run) == RunState(name=name), "without attempts"
    (run.path / "metrics.jsonl").unlink()
    run.start(1, ago=9000)
    assert state(run, "login").name == "silent"
    run.steps(3, ago=ago, apart=60)
    assert state(run, "login").name == name
    run.start(2, ago=60)
    assert state(run, "login").name == "running", "it loads the model"


def test_an_unsupported_lock_is_ignored(run: MadeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    run.start(1, ago=60)
    monkeypatch.setattr(fcntl, "flock", unsupported)
    assert is_locked(run.path / ".lock") is None
    assert state(run) == RunState(name="running")


def test_reading_the_lock_does_not_block_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looking = (tmp_path / ".lock").open("w")
    fcntl.flock(looking, fcntl.LOCK_SH)
    monkeypatch.setattr("time.sleep", lambda seconds: looking.close())
    with closing(RunDirectory(debug(f"run.dir={tmp_path}"))):
        assert looking.closed
        assert is_locked(tmp_path / ".lock")
    assert is_locked(tmp_path / ".lock") is False
