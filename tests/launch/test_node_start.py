"""Jobs that end before Ray starts: immediately, on all nodes, with the reason and a fix."""

from __future__ import annotations

import signal
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from megarl.launch.node.network import port_blocks
from tests.launch.node_job import NOTHING, PATIENCE_S, NodeJob
from tests.leftovers import comes_true

pytestmark = pytest.mark.process


def test_a_mistake_in_a_field_ends_every_node(directory: Path) -> None:
    with NodeJob(directory, "works", "actor.optimizer.lr=fast") as job:
        assert job.exit_codes() == (2, 0)
        assert "[n1] configs/debug/sft.yaml: 1 problem\n  actor.optimizer.lr = fast" in job.output(0)
        assert job.output(1) == ""
        assert job.left() == NOTHING


def test_a_mistake_that_only_the_check_finds_ends_every_node(directory: Path) -> None:
    with NodeJob(directory, "mistaken") as job:
        assert job.exit_codes() == (2, 0)
        assert "[n1] config.yaml: 1 problem\n  model.path = nowhere" in job.output(0)
        end = job.end()
        assert (end["exit_code"], end["node"]) == (2, None)
        assert end["reason"] == "config.yaml: 1 problem\n  model.path = nowhere"
        assert not (job.logs / "driver.log").exists()
        assert job.left() == NOTHING


def test_wrong_nodes_or_ray_versions_are_a_mistake(directory: Path) -> None:
    of_one = ("cluster.nodes=1", "cluster.devices_per_node=4", "cluster.address=10.0.0.1:6379")
    with NodeJob(directory, "works", *of_one) as job:
        assert job.exit_codes() == (2, 0)
        assert "[n1] configs/debug/sft.yaml: 2 problems" in job.output(0)
        assert "cluster.address = 10.0.0.1:6379\n    rule: null: the job starts a Ray of its own" in job.output(0)
        assert "cluster.nodes = 1\n    rule: the job's nodes, 2\n    fix:  set cluster.nodes=2" in job.output(0)
        assert job.left() == NOTHING


def test_an_absent_node_is_named(directory: Path) -> None:
    job = NodeJob(directory, "works", limit_s=10)
    job.start(0)
    assert job.exit_codes() == (1,)
    assert "[n1] no agent has connected from node n2 within 10 s" in job.output(0)
    assert job.end() == {"exit_code": 1, "reason": "no agent has connected from node n2 within 10 s", "node": "n2"}
    assert job.left() == NOTHING


def test_a_node_that_cannot_join_ends_the_job_with_the_reason(directory: Path) -> None:
    job = NodeJob(directory, "works")
    job.start(0)
    # Then the head has claimed its ports.
    assert comes_true(lambda: "configuration checked" in job.output(0), PATIENCE_S)
    with ExitStack() as taken:
        for block in port_blocks(job.number):
            with suppress(OSError):  # the head has one of them
                taken.enter_context(socket.create_server(("", block[0])))
        job.start(1)
        assert job.exit_codes() == (1, 1)
    end = job.end()
    assert (end["exit_code"], end["node"]) == (1, "n2")
    assert end["reason"].startswith(
        "node n2 cannot take part: [Errno 98] each of these ranges has a port that is taken"
    )
    assert end["reason"] in job.output(0)
    assert job.left() == NOTHING


@pytest.mark.parametrize(("index", "codes"), [(0, (2, 0)), (1, (2, 2))])
def test_an_interface_missing_on_one_node_ends_every_node(directory: Path, index: int, codes: tuple[int, int]) -> None:
    job = NodeJob(directory, None)
    job.start(1 - index)
    job.start(index, options=["--interface", "nope0"])
    assert job.exit_codes() == codes
    reason = f"node n{index + 1} cannot take part: --interface nope0 is none of this node's interfaces"
    assert f"[n1] {reason}" in job.output(0)
    assert job.end()["reason"].startswith(reason)
    assert job.left() == NOTHING


def test_a_check_that_exceeds_its_time_ends_every_node(directory: Path) -> None:
    with NodeJob(directory, "slow plan", limit_s=10) as job:
        assert job.exit_codes() == (1, 0)
        assert "[n1] the check of the configuration, its models and its data has not ended within 10 s" in job.output(0)
        assert job.left() == NOTHING


def test_a_node_that_finds_no_head_names_the_searched_path(directory: Path) -> None:
    job = NodeJob(directory, "works", limit_s=2)
    job.start(1)
    assert job.exit_codes() == (1,)
    assert f"[n2] node n2 sees nothing of the first node, n1, in {job.logs} within 2 s" in job.output(1)
    assert job.left() == NOTHING


def test_a_node_with_another_token_is_rejected(directory: Path) -> None:
    job = NodeJob(directory, "works")
    job.start(0)
    job.start(1, {"RAY_AUTH_TOKEN": "f" * 64})
    assert job.exit_codes() == (1, 1)
    end = job.end()
    assert (end["exit_code"], end["node"]) == (1, "n2")
    assert end["reason"].startswith("node n2 was lost: its Ray did not start: ")
    assert "InvalidAuthToken" in end["reason"]
    assert end["reason"] in job.output(0)
    assert job.left() == NOTHING


def test_without_a_token_or_a_job_the_agent_prints_a_fix(directory: Path) -> None:
    job = NodeJob(directory, "works")
    job.start(0, {"RAY_AUTH_TOKEN": ""})
    assert job.exit_codes() == (2,)
    assert "[n1] RAY_AUTH_TOKEN must be a secret of the job's own" in job.output(0)
    job.start(0, {"SLURM_NTASKS": "16"})
    assert job.exit_codes() == (2,)
    assert "the step has 16 tasks on 2 nodes: start it with srun --ntasks-per-node=1" in job.output(0)
    assert job.left() == NOTHING


def test_a_signal_while_the_configuration_is_checked_ends_every_node(directory: Path) -> None:
    with NodeJob(directory, "slow plan") as job:
        job.until("checking", "head.log")
        time.sleep(3)  # for the other node to connect
        start = time.monotonic()
        job.agents[0].send_signal(signal.SIGTERM)
        assert job.exit_codes() == (143, 0)
        assert time.monotonic() - start < 30
        assert job.end() == {"exit_code": 143, "reason": "node n1 got SIGTERM", "node": None}
        assert job.left() == NOTHING
