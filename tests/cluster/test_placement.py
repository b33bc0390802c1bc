"""Placement of devices, also on the nodes of a real Ray, and which rank gets and reports which chunk."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megarl.cluster.placement import order_bundles, visible_devices
from megarl.cluster.ray_node import ENVIRONMENT
from megarl.cluster.ray_worker import ChunkRefs
from megarl.groups.trainers import RemoteRole
from megarl.megatron.worker import MegatronWorker
from megarl.megatron.worker_requests import ForwardRequest
from megarl.remote import RemoteMethod
from megarl.types import Layout, PackRow, RankSchedule, Schedule


def test_numbered_nodes_are_sorted() -> None:
    hosts = {0: "b", 1: "a", 2: "c"}
    assert order_bundles(hosts, {"c": 0, "a": 1, "b": 2}) == [2, 1, 0]
    assert order_bundles(hosts, {"a": 0}) == [1, 0, 2]
    assert order_bundles({0: "a", 1: "a"}, {}) == [0, 1], "virtual nodes"


_TWO_NODES = """
import json, subprocess, sys
import ray
from megarl.cluster import placement
from megarl.cluster.ray_node import NODE_LABEL, STARTED
from megarl.errors import RunError

head = ray.init(num_cpus=0, resources={"device": 4}, include_dashboard=False, object_store_memory=80 << 20,
                logging_level="ERROR", log_to_driver=False, _temp_dir=sys.argv[1], _node_name="n2")
start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=0", "--node-name=n1",
         "--address=" + head.address_info["gcs_address"], "--resources=" + json.dumps({"device": 4}),
         "--labels=" + NODE_LABEL + "=0", "--object-store-memory=" + str(80 << 20)]
with subprocess.Popen(start, stdout=subprocess.PIPE, text=True) as other:
    try:
        assert any(STARTED in line for line in other.stdout)
        placed = placement.Placement(2, 2, virtual=False)
        names = {node["NodeID"]: node["NodeName"] for node in ray.nodes()}
        where = ray.remote(lambda: ray.get_runtime_context().get_node_id())
        for device in (1, 2):
            there = where.options(num_cpus=0, scheduling_strategy=placed.strategy(device)).remote()
            print(device, names[ray.get(there)])
        placement._WAIT_S = 2
        for wanted in ((2, 3), (1, 4)):
            try:
                placement.Placement(*wanted, virtual=False)
            except RunError as error:
                print(error)
    finally:
        other.terminate()
        other.communicate()
"""


@pytest.mark.process
def test_every_node_contributes_its_devices() -> None:
    """Two nodes of four devices: a run of 2 x 2 leaves two free on each, for no run that needs more of a node."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:  # a short path, for the names of sockets
        done = subprocess.run(
            [sys.executable, "-c", _TWO_NODES, directory],
            cwd=Path(__file__).parents[2],
            env={**os.environ, **ENVIRONMENT, "RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"},
            capture_output=True,
            text=True,
            timeout=240,
        )
    assert done.returncode == 0, done.stderr
    *places, unplaced, too_large = done.stdout.splitlines()
    assert places == ["1 n1", "2 n2"]
    offer = "and the nodes of the cluster offer n1: 4, n2: 4, of which 4 are free: start every node with"
    assert unplaced.startswith(
        f"the run needs 2 x 3 devices, {offer} ray start --resources '{{\"device\": 3}}', wait for"
    )
    assert too_large.startswith(f"the run needs 1 x 4 devices, {offer} ray start --resources")


@pytest.mark.parametrize(
    ("inherited", "visible"), [(None, "1,3"), ("4,5,6,7", "5,7"), ("GPU-a,GPU-b,GPU-c,GPU-d", "GPU-b,GPU-d")]
)
def test_a_process_sees_only_its_gpus_of_the_visible_ones(inherited: str | None, visible: str) -> None:
    assert visible_devices((1, 3), inherited) == visible
    assert visible_devices((), inherited) == "", "a process without a device sees one"


class Ranks:
    """Stands in for the processes of a role: records what they are sent."""

    def named(self, name: str) -> Ranks:
        return self

    def submit(self, method: RemoteMethod[Any, ..., Any], args: Sequence[Any], chunks: Sequence[Any]) -> None:
        self.role = method.args
        self.requests = [request for (request,) in args]
        self.chunks = chunks


def test_the_last_stage_reports_the_chunks_of_its_replica() -> None:
    def rows(*chunks: int) -> tuple[PackRow, ...]:
        return tuple(PackRow(chunk=chunk, row=0, prompt_tokens=1, response_tokens=1) for chunk in chunks)

    rank = partial(
        RankSchedule, teachers=("",), pack_tokens=4, total_rows=4, total_sequences=4, total_response_tokens=4
    )
    schedule = Schedule(ranks=(rank(packs=(rows(3, 0), rows(0))), rank(packs=(rows(2), ()))))
    layout = Layout(tp=2, dp=2, pp=2)  # ranks 4 and 5: replica 0's last stage; 6 and 7: replica 1's
    ranks: Any = Ranks()
    request = ForwardRequest(schedule=schedule, chunks=ChunkRefs(dict.fromkeys(range(4))))
    RemoteRole(ranks, "actor", layout).dispatch_by_chunk(MegatronWorker.values, request)
    assert [list(own) for own in ranks.chunks] == [[], [], [], [], [0, 3], [], [2], []]
    assert ranks.role == ("actor",)
    assert [len(part.chunks) for part in ranks.requests] == [2, 2, 1, 1, 2, 2, 1, 1], "those that the replica reads"
    assert [part.schedule for part in ranks.requests] == [schedule.ranks[dp] for dp in (0, 0, 1, 1, 0, 0, 1, 1)]
