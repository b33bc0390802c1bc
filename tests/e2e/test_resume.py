"""A run that is terminated, resumes, loses a rank and restarts ends exactly as the debug run, which nothing disturbed.

It resumes on two nodes with half of the actor and an engine on each, which sleep between rollouts: weights go through
shared memory and over Gloo, and neither samples nor updates depend on the engines.
"""

from __future__ import annotations

import numpy as np
import pytest

from megarl.run.attempts import read_attempts
from tests.e2e.conftest import DebugRun
from tests.e2e.runs import DEBUG, PARTS, numbers, run_to_end

pytestmark = pytest.mark.e2e
TERMINATED = """\
import os, signal; from megarl.stages.ppo.trainer import PPOTrainer; step = PPOTrainer.step; \
PPOTrainer.step = lambda trainer, number: os.kill(os.getpid(), signal.SIGTERM) or step(trainer, number)"""
"""The run gets a signal in its first step."""


STRUCK = "from tests.e2e.strikes import after_checkpoint; after_checkpoint(2, 'train-rank-1.log')"
"""A rank of the run is killed."""
TWO_NODES = ("cluster.nodes=2", "cluster.devices_per_node=2", "rollout.devices=0,2")


@pytest.fixture(scope="module")
def resumed(debug_run: DebugRun, tmp_path_factory: pytest.TempPathFactory) -> DebugRun:
    """The debug run, terminated in its first step, then resumed on two nodes as if it had been killed in its third.

    A rank is killed after the second step; the run restarts itself.
    """
    assert debug_run.finished.status == 0, debug_run.finished.errors
    base = tmp_path_factory.mktemp("resumed")
    directory, recorded = base / "run", base / "recorded"
    settings = ("checkpoint.every=2", "run.grace_period=200", "run.max_restarts=1", f"rollout.record={recorded}")
    command = ["train", DEBUG, f"run.dir={directory}", *settings, *PARTS]
    left = run_to_end(command, TERMINATED)
    assert left.status == 75, left.errors
    assert "preempted after step 1: it got SIGTERM" in left.errors
    left.assert_clean()
    (directory / "checkpoints" / ".step-3.staged").mkdir()
    with (directory / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 2}\n{"step": 3, "obj')
    finished = run_to_end([*command, "rollout.sleep=true", *TWO_NODES], STRUCK)
    finished.assert_succeeded()
    assert "resuming after step 1" in finished.output
    return DebugRun(finished=finished, directory=directory, recorded=recorded)


FILES = ["metrics.jsonl", "updates.jsonl", "evaluations.jsonl", "samples.jsonl"]


@pytest.mark.parametrize("file", FILES)
def test_a_resumed_run_has_the_metrics_of_the_uninterrupted_run(
    debug_run: DebugRun, resumed: DebugRun, file: str
) -> None:
    assert numbers(resumed.directory / file) == numbers(debug_run.directory / file)


def test_its_samples_are_those_of_one_engine_on_one_node(debug_run: DebugRun, resumed: DebugRun) -> None:
    names = {path.name for path in debug_run.recorded.iterdir()}
    assert {path.name for path in resumed.recorded.iterdir()} == names
    writers: set[int] = set()
    for name in names:
        one, two = np.load(debug_run.recorded / name), np.load(resumed.recorded / name)
        for column in ("prompt_ids", "response_ids", "rollout_logprobs", "finished"):
            np.testing.assert_array_equal(one[column], two[column], f"{name}: {column}")
        writers |= {int(engine) for _, _, _, engine in two["versions"]}
    assert writers == {0, 1}


def test_a_resumed_run_exports_the_model_of_the_uninterrupted_run(debug_run: DebugRun, resumed: DebugRun) -> None:
    for export in ("export", "export-ema"):
        straight = debug_run.directory / export / "model.safetensors"
        assert (resumed.directory / export / "model.safetensors").read_bytes() == straight.read_bytes(), export


def test_a_resumed_run_keeps_the_checkpoints(debug_run: DebugRun, resumed: DebugRun) -> None:
    for directory in (debug_run.directory, resumed.directory):
        assert sorted(path.name for path in (directory / "checkpoints").iterdir()) == ["step-2", "step-3"]


def test_every_start_is_a_new_attempt(resumed: DebugRun) -> None:
    attempts = read_attempts(resumed.directory / "attempts.jsonl")
    found = [(each.step, each.end and (each.end.step, each.end.reason)) for each in attempts]
    assert found == [(0, (1, "preempted")), (1, (2, "run error")), (2, (3, "finished"))]


def test_a_restart_names_the_killed_rank(resumed: DebugRun) -> None:
    (announced,) = [line for line in resumed.finished.output.splitlines() if "; restart 1 of 1 from step 2" in line]
    assert announced.startswith("train rank 1 died in ")
