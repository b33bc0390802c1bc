"""How the demo runs a stage, with a program in the place of the command line."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from examples.sort_letters.stages import StageError, train


@pytest.fixture
def console() -> Console:
    return Console(file=StringIO())


def program(path: Path, body: str) -> str:
    """An executable that stands for Python."""
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.process
def test_a_stage_runs_the_ordinary_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, console: Console) -> None:
    told = tmp_path / "told"
    monkeypatch.setattr(sys, "executable", program(tmp_path / "python", f'echo "$A" "$@" > {told}; sleep 0.1'))
    train("sft", ["run.seed=3"], {**os.environ, "A": "marked"}, console)
    assert told.read_text() == "marked -m megarl train configs/demo/sft.yaml run.seed=3\n"
    assert isinstance(console.file, StringIO)
    assert console.file.getvalue() == "\nmegarl train configs/demo/sft.yaml run.seed=3\n"


@pytest.mark.process
def test_a_failed_stage_gives_its_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, console: Console) -> None:
    monkeypatch.setattr(sys, "executable", program(tmp_path / "python", "exit 7"))
    with pytest.raises(StageError, match="the stage ppo ended with status 7") as caught:
        train("ppo", [], os.environ, console)
    assert caught.value.status == 7


@pytest.mark.process
def test_an_interrupt_ends_the_stage_and_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, console: Console
) -> None:
    started, cleaned = tmp_path / "started", tmp_path / "cleaned"
    body = f"trap 'sleep 0.2; touch {cleaned}; exit 143' TERM; touch {started}; while true; do sleep 0.02; done"
    monkeypatch.setattr(sys, "executable", program(tmp_path / "python", body))

    # A shell starts its background jobs with SIGINT ignored, and the tests may run in one.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    main_thread, waiting, wait = threading.get_ident(), threading.Event(), subprocess.Popen.wait

    def told_wait(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        waiting.set()
        return wait(process, timeout)

    def interrupt() -> None:
        waiting.wait()
        while not started.exists():
            time.sleep(0.01)
        signal.pthread_kill(main_thread, signal.SIGINT)

    monkeypatch.setattr(subprocess.Popen, "wait", told_wait)
    threading.Thread(target=interrupt, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            train("sft", [], os.environ, console)
    finally:
        signal.signal(signal.SIGINT, before)
    assert cleaned.exists()
