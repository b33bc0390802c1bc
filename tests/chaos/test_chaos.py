"""Seeded kills, stops and delays of any process at any time: a run ends exactly, or with one clear error and resumes.

``make chaos`` takes 100 trials. The number alone determines a trial, but when its fault hits the run depends on the
machine.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.runs import finish, lines, started
from tests.e2e.test_asynchronous import GRPO, SETTINGS, numbers, run
from tests.e2e.test_endings import process_that_prints_to

TRIALS = int(os.environ.get("CHAOS_TRIALS", "1"))
VICTIMS = {"engine 0": "rollout-engine-0", "engine 1": "rollout-engine-1", "trainer": "train-rank-0", "driver": None}
BLOWS = {"kill": (signal.SIGKILL, 0.0), "stop": (signal.SIGSTOP, 0.0), "delay": (signal.SIGSTOP, 3.0)}
LIMITS = [f"cluster.time_limits.{phase}=60" for phase in ("rollout", "inference", "update", "sync", "checkpoint")]
RUN = [
    "rollout.devices=1-2",
    "rollout.max_replacements=1",
    "cluster.time_limits.start=120",
    *LIMITS,
]

pytestmark = [pytest.mark.e2e, pytest.mark.matrix, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of an undisturbed run."""
    directory = tmp_path_factory.mktemp("chaos") / "straight"
    finished = run(directory, *RUN)
    assert finished.status == 0, finished.errors
    return directory


@pytest.mark.parametrize("trial", range(TRIALS))
def test_a_disturbed_run_ends_with_the_same_result_or_can_be_resumed(
    straight: Path, tmp_path: Path, trial: int
) -> None:
    chance = random.Random(trial)
    victim, blow = chance.choice(sorted(VICTIMS)), chance.choice(sorted(BLOWS))
    if victim == "driver":
        blow = "kill"  # nothing monitors the driver: stopped, it waits for its user
    attempts = lines(straight / "attempts.jsonl")
    wait_s = chance.random() * (attempts[-1]["time"] - attempts[0]["time"])
    directory = tmp_path / "run"
    with started(["train", GRPO, f"run.dir={directory}", *SETTINGS, *RUN]) as program:
        struck = strike(program[0].pid, directory, victim, *BLOWS[blow], wait_s)
        finished = finish(*program)
    finished.assert_clean() if victim != "driver" else None
    if finished.status != 0:
        if victim != "driver":
            assert struck
            assert finished.status == 1, finished.errors
            assert "Traceback" not in finished.errors.splitlines()[0]
        resumed = run(directory, *RUN)
        assert resumed.status == 0, f"{victim}, {blow} after {wait_s:.1f} s: {resumed.errors}"
        resumed.assert_clean()
    assert numbers(directory) == numbers(straight)
    assert (directory / "export/model.safetensors").read_bytes() == (straight / "export/model.safetensors").read_bytes()


def strike(driver: int, directory: Path, victim: str, number: int, seconds: float, wait_s: float) -> bool:
    """Sends a signal to a process of a run after a while, and continues it after `seconds`; False if it had ended."""
    time.sleep(wait_s)
    log = VICTIMS[victim]
    try:
        pid = driver if log is None else process_that_prints_to(directory / "logs" / f"{log}.log")
        os.kill(pid, number)
        if seconds:
            time.sleep(seconds)
            os.kill(pid, signal.SIGCONT)
    except (AssertionError, ProcessLookupError):
        return False
    return True
