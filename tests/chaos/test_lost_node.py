"""A run on a Ray of two nodes that loses one of them goes on with the other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from megarl.cluster.ray_node import ENVIRONMENT
from megarl.run.attempts import read_attempts
from tests.e2e.runs import ROOT, finish, lines, started
from tests.leftovers import comes_true

pytestmark = [pytest.mark.e2e, pytest.mark.matrix]

SFT = "configs/debug/sft.yaml"
SETTINGS = [
    "run.steps=10",
    "checkpoint.every=1",
    "groups.train={devices: 0-3, roles: {actor: {tp: 2, pp: 1, tokens_per_micro_batch: 128}}}",
]
NODES = """
import json, subprocess, sys
import ray
from megarl.cluster.ray_node import NODE_LABEL, STARTED

head = ray.init(num_cpus=0, resources={"device": 2}, include_dashboard=False, object_store_memory=80 << 20,
                logging_level="ERROR", log_to_driver=False, _temp_dir=sys.argv[1], labels={NODE_LABEL: "0"})
address = head.address_info["gcs_address"]
start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=0", "--address=" + address,
         "--resources=" + json.dumps({"device": 2}), "--labels=" + NODE_LABEL + "=1",
         "--object-store-memory=" + str(80 << 20)]
with subprocess.Popen(start, stdout=subprocess.PIPE, text=True) as other:
    assert any(STARTED in line for line in other.stdout)
    print(address, other.pid, flush=True)
    sys.stdin.read()
    other.terminate()
    other.communicate()
"""


@contextmanager
def two_nodes() -> Iterator[tuple[str, int]]:
    """A Ray of two nodes of two devices: its address, and the process of the second node."""
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as directory:
        command = [sys.executable, "-c", NODES, directory]
        with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
            assert program.stdout is not None
            address, node = program.stdout.readline().split()
            try:
                yield address, int(node)
            finally:
                program.communicate(timeout=60)


def family(pid: int) -> list[int]:
    """A process and all below it."""
    children = [file.read_text().split() for file in Path(f"/proc/{pid}/task").glob("*/children")]
    return [pid, *(below for each in children for child in each for below in family(int(child)))]


def test_a_run_goes_on_without_a_lost_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**ENVIRONMENT, "RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}.items():
        monkeypatch.setenv(name, value)
    directory = tmp_path / "run"
    with two_nodes() as (address, node):
        cluster = f"cluster={{device: cpu, nodes: 2, devices_per_node: 2, min_nodes: 1, address: '{address}'}}"
        command = ["train", SFT, f"run.dir={directory}", *SETTINGS, cluster, "run.max_restarts=1"]
        with started(command) as program:
            metrics = directory / "metrics.jsonl"
            assert comes_true(lambda: metrics.exists() and len(lines(metrics)) >= 3, 200)
            for pid in family(node):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            finished = finish(*program)
    assert finished.status == 0, finished.errors
    assert "1 of 2 nodes are left; it restarts on 1 node, from step " in finished.output
    assert [each.end and each.end.reason for each in read_attempts(directory / "attempts.jsonl")] == [
        "run error",
        "run error",
        "finished",
    ]
    whole = tmp_path / "whole"
    with started(["train", SFT, f"run.dir={whole}", *SETTINGS]) as program:
        assert finish(*program).status == 0
    for name in ("sft/loss", "sft/grad_norm"):
        numbers = [[line[name] for line in lines(each / "metrics.jsonl")] for each in (directory, whole)]
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-5), name
