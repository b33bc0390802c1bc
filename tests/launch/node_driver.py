"""A driver with light processes on all devices, which ends as MEGARL_TEST_DRIVER says, in place of ``megarl train``."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from multiprocessing import shared_memory
from pathlib import Path

import ray

from megarl.cluster.session import Session
from megarl.config import load


class Litterer:
    """A process of the run that leaves things behind."""

    def litter(self) -> str:
        """A child, shared memory and a temporary file; returns Ray's number of the node."""
        subprocess.Popen(["sleep", "600"])
        self.memory = shared_memory.SharedMemory(create=True, size=1024)
        Path(tempfile.mkdtemp(), "scratch").touch()
        return ray.get_runtime_context().get_node_id()

    def stay(self) -> None:
        time.sleep(600)


def plan(how: str) -> None:
    """In place of ``megarl plan config``."""
    if how == "mistaken":
        print("config.yaml: 1 problem\n  model.path = nowhere", file=sys.stderr)
        sys.exit(2)
    print("checking", flush=True)
    if how == "slow plan":
        time.sleep(60)


def drive(how: str, path: str, *overrides: str) -> None:
    """In place of ``megarl train``."""
    config = load(path, overrides)
    with Session(config.cluster, Path(config.run.dir) / "logs", config.cluster.address) as session:
        devices = range(config.cluster.nodes * config.cluster.devices_per_node)
        target = "tests.launch.node_driver:Litterer"
        processes = [session.launch(f"litterer {device}", [device], target) for device in devices]
        nothing = [() for _ in devices]
        names = {node["NodeID"]: node["NodeName"] for node in ray.nodes()}
        nodes = session.watch.submit("litter", "start", "litter", processes, nothing).wait()
        print("busy on", *(names[node] for node in nodes), flush=True)
        if how == "fails":
            raise ArithmeticError("the loss is a teapot")
        if how == "stays":
            session.watch.submit("stay", "rollout", "stay", processes, nothing).wait()
    print("done", flush=True)


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    how = os.environ["MEGARL_TEST_DRIVER"]
    plan(how) if what == "plan" else drive(how, *arguments)
