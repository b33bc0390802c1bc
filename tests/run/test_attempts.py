"""Contents of attempts.jsonl, and how damaged lines are handled."""

from __future__ import annotations

import errno
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from megarl.run.attempts import Attempt, AttemptEnd, AttemptLog, read_attempts


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "attempts.jsonl"


def test_an_attempt_has_a_start_line_and_an_end_line(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100.0, 160.5, 200.0])
    first = AttemptLog(file, clock=lambda: next(times))
    first.start(0)
    first.end(7, "run error", "train rank 3 died\nünd so")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    AttemptLog(file, clock=lambda: next(times)).start(6)
    here: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid()}
    end: dict[str, Any] = {"time": 160.5, "step": 7, "reason": "run error", "message": "train rank 3 died\nünd so"}
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        {"event": "start", "number": 1, "time": 100.0, "step": 0, **here, "job": None, "restart": 0},
        {"event": "end", "number": 1, **end},
        {"event": "start", "number": 2, "time": 200.0, "step": 6, **here, "job": "4711", "restart": 1},
    ]
    assert read_attempts(file) == [
        Attempt(number=1, time=100.0, step=0, **here, end=AttemptEnd(**end)),
        Attempt(number=2, time=200.0, step=6, **here, job="4711", restart=1),
    ]


def test_a_truncated_line_of_a_killed_process_is_ignored(file: Path) -> None:
    AttemptLog(file).start(0)
    with file.open("a") as lines:
        lines.write('{"event": "end", "num')
    log = AttemptLog(file)
    log.start(4)
    log.end(9, "finished")
    steps = [(attempt.number, attempt.step, attempt.end and attempt.end.step) for attempt in read_attempts(file)]
    assert steps == [(1, 0, None), (2, 4, 9)]
    assert len(file.read_text().splitlines()) == 4


def test_lines_of_another_kind_are_skipped(file: Path) -> None:
    file.write_text(
        '{"event": "end", "number": 5, "time": 1.0, "step": 1, "reason": "finished"}\n'
        '{"event": "start", "number": 6}\n{"event": "pause"}\n{}\n'
    )
    assert read_attempts(file) == []
    assert read_attempts(file.with_name("none")) == []


def test_a_full_disk_neither_fails_a_run_nor_hides_its_error(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = AttemptLog(file)
    log.start(0)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    log.end(3, "finished")
    assert capsys.readouterr().err == f"{file}: No space left on device; megarl status will not know of this attempt\n"
    AttemptLog(file.parent / "gone" / "attempts.jsonl").end(3, "finished")
    assert capsys.readouterr().err == "", "the error of the run names the directory that is gone"


def test_a_very_long_message_is_truncated(file: Path) -> None:
    log = AttemptLog(file)
    log.start(0)
    log.end(0, "exception", "x" * 10**6 + "\udcff")
    log.start(0)
    log.end(0, "exception", "a name that is no text: \udcff")
    messages = [attempt.end and attempt.end.message for attempt in read_attempts(file)]
    assert messages == ["x" * 4000, "a name that is no text: \udcff"]
