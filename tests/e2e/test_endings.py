"""A real run that is interrupted while its ranks and its engine work: nothing is left."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from megarl.dashboard.status.reading import read_status
from tests.e2e.runs import DEBUG, finish, lines, started
from tests.security.listeners import assert_closed

pytestmark = [pytest.mark.e2e]

ROLES = "groups.train.roles"
SMALL = [
    "run.steps=100000",
    "cluster.devices_per_node=2",
    "groups.train.devices=0-1",
    f"{ROLES}.actor={{tp: 2, pp: 1}}",
    f"{ROLES}.critic={{pp: 1}}",
]
"""Two ranks and an engine, until something ends them."""


def test_an_interrupt_ends_a_run_that_trains(tmp_path: Path) -> None:
    """Other signals, phases and deaths of processes: tests/cluster/test_endings.py."""
    directory = tmp_path / "run"
    with started(["train", DEBUG, f"run.dir={directory}", *SMALL]) as run:
        wait_for(directory / "metrics.jsonl")
        assert_closed(run[1].pids())
        run[0].send_signal(signal.SIGINT)
        finished = finish(*run)
    assert finished.status == 130, finished.errors
    assert "Traceback" not in finished.errors
    assert "interrupted; nothing of the run is left running. The same command starts it again" in finished.errors
    finished.assert_clean()
    found = read_status(directory)
    assert (found.state.name, found.state.message) == ("interrupted", "SIGINT")
    assert found.progress.step > 0


def wait_for(file: Path) -> None:
    """Returns when a file has a line."""
    deadline = time.monotonic() + 200
    while not (file.exists() and (file.suffix != ".jsonl" or lines(file))):
        assert time.monotonic() < deadline, f"{file} did not appear"
        time.sleep(0.2)


def process_that_prints_to(log_file: Path) -> int:
    """The process whose standard output is this file."""
    for directory in Path("/proc").iterdir():
        try:
            if directory.name.isdigit() and (directory / "fd" / "1").readlink() == log_file:
                return int(directory.name)
        except OSError:
            continue
    raise AssertionError(f"nobody prints to {log_file}")
