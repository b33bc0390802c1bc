"""However a job ends once Ray runs: the output has the reason, the exit code is right, and no node has leftovers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.node_job import NOTHING, ONE_EACH, STAGES, NodeJob
from tests.leftovers import comes_true

pytestmark = [pytest.mark.process, pytest.mark.e2e]

PROMPT_S = 90.0
"""From what ends a job to the end of its agents, cleaning up included; on a busy machine."""


@pytest.fixture
def busy(directory: Path) -> Iterator[NodeJob]:
    """A job whose driver has an actor on each node, which has a child of its own; its run does not save."""
    with NodeJob(directory, "stays", "run.grace_period=0", *ONE_EACH) as job:
        job.until("busy on n1 n2")
        assert comes_true(lambda: sum("sleep 600" in line for line in job.trace.processes()) == 2)
        yield job


def ended(job: NodeJob, start: float) -> tuple[int, ...]:
    """The agents' exit codes; nothing is left, and none of it took long."""
    codes = job.exit_codes()
    assert job.left() == NOTHING
    assert time.monotonic() - start < PROMPT_S
    return codes


@pytest.mark.matrix
def test_the_driver_runs_on_all_nodes_in_their_order(directory: Path) -> None:
    with NodeJob(directory, "works") as job:
        assert job.exit_codes() == (0, 0), job.output(0) + job.log("head.log")
        assert "busy on n1 n1 n2 n2\ndone\n" in job.output(0)
        assert job.log("driver.log").endswith("done\n")
        assert job.end() == {"exit_code": 0, "reason": "finished", "node": None}
        stages = [line.split('"')[3] for line in job.log("times.jsonl").splitlines()]
        assert stages == list(STAGES)
        assert sorted(path.name for path in job.logs.iterdir()) == [
            *("driver.log", "end.json", "head.log", "ray.json", "times.jsonl", "worker-1.log")
        ]
        assert job.left() == NOTHING


def test_the_job_has_the_drivers_exit_code(directory: Path) -> None:
    with NodeJob(directory, "fails", *ONE_EACH) as job:
        assert job.exit_codes() == (1, 0)
        assert "megarl train ended with exit code 1: ArithmeticError: the loss is a teapot" in job.output(0)
        assert job.end()["node"] is None
        for place in ("head", "worker-1"):
            assert (job.logs / f"ray-{place}" / "raylet.out").exists()
            assert not list((job.logs / f"ray-{place}").glob("dashboard.*")), "nobody looks at it"
        assert job.left() == NOTHING


def test_a_run_saves_before_its_job_ends(directory: Path) -> None:
    """Its agents get SIGTERM; tests/slurm/test_jobs_several.py has a signal to all processes, also those of Ray."""
    with NodeJob(directory, "saves") as job:
        job.until("busy on n1 n1 n2 n2")
        start = time.monotonic()
        for agent in job.agents.values():
            agent.send_signal(signal.SIGTERM)
        assert ended(job, start) == (75, 0), job.output(0) + job.output(1)
        said = "preempted after step 1: it got SIGTERM. Run the same command to continue"
        reason = f"megarl train ended with exit code 75: {said}"
        assert job.end() == {"exit_code": 75, "reason": reason, "node": None}
        assert not (job.logs / "ray-head").exists()


@pytest.mark.matrix
def test_a_killed_driver_ends_the_job(busy: NodeJob) -> None:
    start = time.monotonic()
    busy.kill("tests.launch.node_driver train")
    assert ended(busy, start) == (137, 0)
    assert "megarl train ended with exit code 137" in busy.output(0)
    assert (busy.logs / "ray-head" / "raylet.out").exists()


@pytest.mark.matrix
def test_a_killed_agent_of_another_node_ends_the_job(busy: NodeJob) -> None:
    start = time.monotonic()
    busy.agents[1].kill()
    assert ended(busy, start) == (1, -signal.SIGKILL)
    reason = "node n2 was lost: Ray has lost the connection to it"
    assert busy.end() == {"exit_code": 1, "reason": reason, "node": "n2"}
    assert f"[n1] {reason}" in busy.output(0)
    assert busy.log("driver.log").endswith(f"{reason}\n")
    assert (busy.logs / "ray-worker-1" / "raylet.out").exists()


@pytest.mark.matrix
def test_a_killed_agent_of_the_first_node_ends_the_job(busy: NodeJob) -> None:
    start = time.monotonic()
    busy.agents[0].kill()
    assert ended(busy, start) == (-signal.SIGKILL, 1)
    reason = "node n1 was lost: the driver runs there, and its Ray does not answer"
    assert f"[n2] {reason}" in busy.output(1)
    assert busy.end() == {"exit_code": 1, "reason": reason, "node": "n1"}


@pytest.mark.matrix
def test_a_killed_raylet_of_the_first_node_ends_the_job(busy: NodeJob) -> None:
    """That of another node is killed in tests/slurm/test_jobs_failures.py."""
    start = time.monotonic()
    busy.kill('--labels={"megarl-node": "0"}')
    assert ended(busy, start) == (1, 0)
    end = busy.end()
    assert end["reason"].startswith("node n1 was lost: its Ray has ended with exit code 1")
    assert (end["exit_code"], end["node"]) == (1, "n1")
    assert "node n1 was lost: its Ray" in busy.output(0)
    assert (busy.logs / "ray-head" / "raylet.out").exists()


def test_a_signal_to_the_agent_of_another_node_ends_the_job(busy: NodeJob) -> None:
    start = time.monotonic()
    os.kill(busy.agents[1].pid, signal.SIGTERM)
    assert ended(busy, start) == (143, 143)
    assert busy.end() == {"exit_code": 143, "reason": "node n2 got SIGTERM", "node": "n2"}


def test_a_signal_while_ray_starts_ends_the_job(directory: Path) -> None:
    """To every process, as Slurm sends it; tests/slurm/test_jobs_failures.py cancels a job that trains."""
    with NodeJob(directory, "works", *ONE_EACH) as job:
        job.until("Local node IP", "worker-1.log")
        start = time.monotonic()
        job.kill("", signal.SIGTERM)
        assert ended(job, start) == (143, 143)
        assert not (job.logs / "driver.log").exists()
