"""However and in whatever phase a run ends, the user sees the first real error, and the run leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.ending import LIMIT_S, RAY
from tests.cluster.ending_workers import SIGNALS

pytestmark = [pytest.mark.dist, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
FAILING = ("start", "rollout", "inference")
KILLED = ("rollout", "update", "sync", "checkpoint")
HANGING = ("rollout", "sync")
"""Phases that differ in how the driver waits: for one call, a stream, a column, calls on two groups."""
INTERRUPTED = (*((name, RAY) for name in SIGNALS), ("SIGTERM", "update"))
CASES = [
    "normal:checkpoint",
    *map(":".join, INTERRUPTED),
    *(f"exception:{phase}" for phase in FAILING),
    *(f"SIGKILL:{phase}" for phase in KILLED),
    *(f"hang:{phase}" for phase in HANGING),
]
PROGRAMS = 3

CALLS = {
    "start": "train rank 1 {} in train.start",
    "rollout": "rollout engine 0 {} in rollout.generate",
    "inference": "train rank 1 {} in actor.logprobs",
    "update": "train rank 1 {} in actor.update",
    "sync": "train rank 1 {} in actor.send_weights",
    "checkpoint": "train rank 1 {} in actor.save",
}
"""By phase, who fails in which call."""

Results = Mapping[str, dict[str, Any]]


@pytest.fixture(scope="module")
def results() -> Results:
    """The result of every case; several programs run them in parallel."""
    with ThreadPoolExecutor(PROGRAMS) as executor:
        outputs = list(executor.map(_program, (CASES[index::PROGRAMS] for index in range(PROGRAMS))))
    lines = [json.loads(line) for output in outputs for line in output.splitlines() if line.startswith("{")]
    return {line["case"]: line for line in lines}


def _program(cases: list[str]) -> str:
    command = [sys.executable, "-m", "tests.cluster.ending", *cases]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_left(results: Results, case: str) -> None:
    left = results[case]
    assert (left["processes"], left["shared_memory"], left["temporary"]) == ([], [], [])


def test_the_normal_end_has_no_error(results: Results) -> None:
    assert results["normal:checkpoint"]["error"] == ""


@pytest.mark.parametrize(("name", "phase"), INTERRUPTED)
def test_a_signal_ends_the_run_with_its_exit_code(results: Results, name: str, phase: str) -> None:
    errors = {"SIGINT": "KeyboardInterrupt: ", "SIGTERM": "SystemExit: 143"}
    assert results[f"{name}:{phase}"]["error"] == errors[name]


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith(("exception", "SIGKILL"))])
def test_a_failing_or_killed_rank_is_named_with_its_error(results: Results, case: str) -> None:
    ending, _, phase = case.partition(":")
    how = {"exception": "failed", "SIGKILL": "died"}[ending]
    what = {"exception": ": ArithmeticError('the loss is a teapot')", "SIGKILL": "."}[ending]
    assert results[case]["error"].splitlines()[0] == f"WorkerError: {CALLS[phase].format(how)}{what}"


@pytest.mark.parametrize("phase", HANGING)
def test_a_hanging_rank_is_named_with_its_time_limit(results: Results, phase: str) -> None:
    first, second, *_ = results[f"hang:{phase}"]["error"].splitlines()
    assert first.startswith(f"WorkerError: No answer within {LIMIT_S:g} s from ")
    assert second == f"Raise cluster.time_limits.{phase} if it may take longer."
    process, _, call = CALLS[phase].partition(" {}")
    assert first.endswith(f"{process}{call}.")


def test_the_rank_that_has_not_come_is_named_with_its_stack(results: Results) -> None:
    told = results[f"hang:{HANGING[1]}"]["error"]
    assert "Not in the collective in which train rank 0 waits: train rank 1." in told
    place = '/tests/cluster/ending_workers.py", line [0-9]+ in '
    after = told.partition("train rank 1, the innermost frames first:\n")[2]
    assert re.match(f'  File ".*{place}act\n  File ".*{place}send_weights\n', after)


@pytest.mark.parametrize("phase", HANGING)
def test_all_processes_of_a_hanging_run_leave_their_stacks(results: Results, phase: str) -> None:
    stacks = results[f"hang:{phase}"]["stacks"]
    assert stacks.keys() >= {"driver", CALLS[phase].partition(" {}")[0].replace(" ", "-")}
    assert "in _expire" in stacks["driver"]
    assert all("most recent call first" in text for text in stacks.values()), stacks
