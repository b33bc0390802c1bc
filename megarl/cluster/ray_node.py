"""A node of a run's own Ray on a cluster: the command that starts it, and the watch over all of them.

Whoever starts nodes need not import Ray; the watch is a process of its own, ``python -m megarl.cluster.ray_node``.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

DEVICE = "device"
"""Ray's resource of which a node has one for each of the run's devices."""
NODE_LABEL = "megarl-node"
"""Ray's label of a node that has the node's number in the run."""

ENVIRONMENT: Final = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the shell sets CUDA_VISIBLE_DEVICES itself
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray would kill the children of a process with it, those too that remove its shared memory.
    "RAY_kill_child_processes_on_worker_exit": "false",
    "RAY_process_group_cleanup_enabled": "false",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # a node that is told to end has nothing to hand over
    "SPT_NOENV": "1",  # Ray's agents rename themselves, and would write over the environment by which they are found
}
"""Of every Ray that is the run's own."""

STARTED: Final = "Ray runtime started."
"""What the command prints when the node is up (ray 2.60, ``scripts.py``)."""

_SHORT_PATH = 20
_MIB = 1 << 20
READY: Final = "Ray is ready on all nodes"
"""What `watch_command` prints when every node is there with its devices."""
_LOOK_S, _WATCH_S = 0.1, 1.0
_ANSWER_S = 5.0


def new_directory() -> str:
    """A new directory for Ray's files and sockets, whose paths are limited to 107 bytes, of which Ray adds about 80."""
    usual = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="megarl-", dir=usual if len(usual) <= _SHORT_PATH else "/tmp")


@dataclass(frozen=True, kw_only=True)
class RayNode:
    """A node to start.

    Args:
        index: its number in the run; the head is 0.
        name: for messages.
        address: of this machine.
        head: host and port of Ray's head.
        ports: of this node, of which the first is that of the head; nine must be free.
        devices: of the node.
        object_store_mib: shared memory of the node.
        directory: for Ray's files.
    """

    index: int
    name: str
    address: str
    head: str
    ports: range
    devices: int
    object_store_mib: int
    directory: str

    def command(self) -> list[str]:
        """What starts it, and runs until it ends; killed, it takes Ray's own processes with it."""
        gcs, client, dashboard, manager, store, agent, agent_grpc, runtime_env, metrics, first_worker, *_ = self.ports
        # Ray wants a port for its dashboard even where it has none.
        head = [f"--port={gcs}", f"--ray-client-server-port={client}", f"--dashboard-port={dashboard}"]
        place = ["--head", *head, "--include-dashboard=false", "--no-monitor"]
        return [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block"),
            *(place if self.index == 0 else [f"--address={self.head}"]),
            f"--node-ip-address={self.address}",
            f"--node-name={self.name}",
            f"--labels={NODE_LABEL}={self.index}",
            f"--resources={json.dumps({DEVICE: self.devices})}",
            *("--num-cpus=0", "--num-gpus=0", "--include-log-monitor=false"),
            f"--object-store-memory={self.object_store_mib * _MIB}",
            f"--temp-dir={self.directory}",
            f"--node-manager-port={manager}",
            f"--object-manager-port={store}",
            f"--dashboard-agent-listen-port={agent}",
            f"--dashboard-agent-grpc-port={agent_grpc}",
            f"--runtime-env-agent-port={runtime_env}",
            f"--metrics-export-port={metrics}",
            f"--min-worker-port={first_worker}",
            f"--max-worker-port={self.ports.stop - 1}",
        ]


def watch_command(head: str, devices: int, names: Sequence[str]) -> list[str]:
    """Waits until all nodes of these names are there with their devices, and then until one is gone.

    It prints whom it waits for, then READY, and at its end the name of the node that is gone.

    Args:
        head: host and port of Ray's head.
        devices: of each node.
        names: of the nodes, in their order.
    """
    return [sys.executable, "-m", __name__, head, str(devices), *names]


def main(head: str, devices: str, *names: str) -> None:
    """Watches the table of nodes."""
    from ray import _raylet

    untyped: Any = _raylet

    told = ""
    while told != READY:
        try:
            # A client of its own each time: one that cannot connect for long ends its process.
            there = _there(untyped.GcsClient(address=head), int(devices))
            missing = [name for index, name in enumerate(names) if index not in there]
        except Exception as error:  # whatever Ray raises while its head does not answer
            missing = [f"{names[0]} ({type(error).__name__}: {error})"]
        if (now := f"waiting for Ray on {', '.join(missing)}" if missing else READY) != told:
            print(told := now, flush=True)
        time.sleep(_LOOK_S)
    while True:
        time.sleep(_WATCH_S)
        try:
            there = _there(untyped.GcsClient(address=head), int(devices))
        except Exception:  # the head's own end is not told here
            continue
        for index, name in enumerate(names):
            if index not in there:
                print(name, flush=True)
                return


def _there(client: Any, devices: int) -> set[int]:
    """The nodes that live and have all their devices."""
    found = client.get_all_node_info(timeout=_ANSWER_S).values()
    return {
        int(node.labels[NODE_LABEL])
        for node in found
        if node.state == 0 and node.resources_total.get(DEVICE, 0) == devices
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
