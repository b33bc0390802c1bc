"""The nodes of a job's own Ray: the command that starts one, and a process that watches all of them.

The importing process does not import Ray; the watching process is
`python -m megarl.cluster.ray_node`.
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
"""The Ray resource that counts a node's devices."""
NODE_LABEL = "megarl-node"
"""The Ray label with a node's number in the run."""

ENVIRONMENT: Final = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the shell sets CUDA_VISIBLE_DEVICES itself
    "RAY_USAGE_STATS_ENABLED": "0",
    # Otherwise Ray kills the children of a process with it, also the one that removes its shared memory.
    "RAY_kill_child_processes_on_worker_exit": "false",
    "RAY_process_group_cleanup_enabled": "false",
    "RAY_worker_niceness": "0",  # at Ray's 15, anything else on a busy machine comes before the ranks
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # a node that ends has nothing to hand over
    # Ray's head would keep 3 kB of each of the last 100,000 calls, for a dashboard.
    "RAY_task_events_report_interval_ms": "0",
    "SPT_NOENV": "1",  # Ray's agents rename themselves, which overwrites the environment with the session's mark
}
"""Environment variables of every Ray that MegaRL starts."""

START_HOOK: Final = {"RAY_START_HOOK": "megarl.cluster.ray_api.skip_idle_processes"}
"""Environment variable of the command that starts a node."""

STARTED: Final = "Ray runtime started."
"""The line that the command prints when the node is up (ray 2.60, `scripts.py`)."""

_SHORT_PATH = 18
_MIB = 1 << 20
READY: Final = "Ray is ready on all nodes"
"""The line that `watch_command` prints when every node is up with its devices."""
_LOOK_S = 0.1
_WATCH_S = 1.0
_ANSWER_S = 5.0


def new_directory() -> str:
    """Makes a directory that only this user can enter, for Ray's and other temporary files.

    Paths of sockets are limited to 107 bytes, of which Ray needs about 70.
    """
    usual = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="megarl-", dir=usual if len(usual) <= _SHORT_PATH else "/tmp")


def ray_directory(directory: str) -> str:
    """Returns the place for Ray's files in one of `new_directory`: Ray lets everybody write there (ray 2.60)."""
    return f"{directory}/r"


@dataclass(frozen=True, kw_only=True)
class RayNode:
    """A Ray node to start.

    Args:
        index: number in the run; the head is 0.
        head: `host:port` of Ray's head.
        ports: ports of this node; the first is the head's.
        directory: one of `new_directory`.
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
        """Returns the command that runs the node; when it is killed, Ray's processes end, too."""
        gcs, client, dashboard, manager, store, agent, agent_grpc, runtime_env, metrics, first_worker, *_ = self.ports
        place = [f"--address={self.head}"]
        if self.index == 0:  # Ray needs a port for the dashboard even without one
            place = ["--head", f"--port={gcs}", f"--ray-client-server-port={client}", f"--dashboard-port={dashboard}"]
            place += ["--include-dashboard=false", "--no-monitor"]
        return [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block"),
            *place,
            f"--node-ip-address={self.address}",
            f"--node-name={self.name}",
            f"--labels={NODE_LABEL}={self.index}",
            f"--resources={json.dumps({DEVICE: self.devices})}",
            *("--num-cpus=0", "--num-gpus=0", "--include-log-monitor=false"),
            f"--object-store-memory={self.object_store_mib * _MIB}",
            f"--temp-dir={ray_directory(self.directory)}",
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
    """Returns the command that watches the nodes.

    It prints the names of the nodes that it waits for, then READY, and ends with the name of the
    first node that is lost.

    Args:
        head: `host:port` of Ray's head.
        devices: devices per node.
        names: names of the nodes, by number.
    """
    return [sys.executable, "-m", __name__, head, str(devices), *names]


def main(head: str, devices: str, *names: str) -> None:
    """Watches the nodes; see `watch_command`."""
    from ray import _raylet

    untyped: Any = _raylet

    def missing_nodes() -> list[str]:
        # A new client each time: one that cannot connect for a while ends its process.
        nodes = untyped.GcsClient(address=head).get_all_node_info(timeout=_ANSWER_S).values()
        up: set[int] = set()
        for node in nodes:
            if node.state == 0 and node.resources_total.get(DEVICE, 0) == int(devices):
                up.add(int(node.labels[NODE_LABEL]))
        return [name for index, name in enumerate(names) if index not in up]

    printed = ""
    while printed != READY:
        try:
            missing = missing_nodes()
        except Exception as error:  # whatever Ray raises while its head does not answer
            missing = [f"{names[0]} ({type(error).__name__}: {error})"]
        now = f"waiting for Ray on {', '.join(missing)}" if missing else READY
        if now != printed:
            printed = now
            print(printed, flush=True)
        time.sleep(_LOOK_S)
    while True:
        time.sleep(_WATCH_S)
        try:
            missing = missing_nodes()
        except Exception:  # the end of the head is not reported here
            continue
        if missing:
            print(missing[0], flush=True)
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
