"""A driver with light processes on all devices, in place of ``megarl train``; MEGARL_TEST_DRIVER says how it ends."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from multiprocessing import shared_memory
from pathlib import Path

import ray

from megarl.cluster.session import Session
from megarl.cluster.workers import WorkerGroup
from megarl.config import load
from megarl.errors import PreemptedError
from megarl.remote import remote
from megarl.run.preemption import Preemption


class Litterer:
    """A process of the run that leaves things behind."""

    @remote(phase="start")
    def litter(self) -> str:
        """A child, shared memory and a temporary file; returns Ray's number of the node."""
        subprocess.Popen(["sleep", "600"])
        self.memory = shared_memory.SharedMemory(create=True, size=1024)
        Path(tempfile.mkdtemp(), "scratch").touch()
        return ray.get_runtime_context().get_node_id()

    @remote(phase="checkpoint")
    def save(self) -> None:
        """Does nothing, but it is there."""

    @remote(phase="rollout")
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
    from tests.launch.node_driver import Litterer as worker  # noqa: N813  (here, it is that of __main__)

    config = load(path, overrides)
    with Session(config.cluster, Path(config.run.dir) / "logs") as session:
        devices = range(config.cluster.nodes * config.cluster.devices_per_node)
        processes = [session.launch(f"litterer {device}", partial(worker), [device]) for device in devices]
        session.run(work(how, WorkerGroup(session, "litterers", processes), worker))
    print("done", flush=True)


async def work(how: str, litterers: WorkerGroup[Litterer], worker: type[Litterer]) -> None:
    """Makes all processes busy, and ends as it is told."""
    names = {node["NodeID"]: node["NodeName"] for node in ray.nodes()}
    nodes = await litterers.call(worker.litter)
    print("busy on", *(names[node] for node in nodes), flush=True)

    async def save() -> None:
        await litterers.call(worker.save)

    if how == "fails":
        raise ArithmeticError("the loss is a teapot")
    if how == "saves":
        with Preemption(60.0, None) as preemption:
            while not preemption.leaves():
                await asyncio.sleep(0.1)
            await preemption.saved(1, save)
    if how == "stays":
        await litterers.call(worker.stay)


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    how = os.environ["MEGARL_TEST_DRIVER"]
    try:
        plan(how) if what == "plan" else drive(how, *arguments)
    except PreemptedError as error:
        print(error)
        sys.exit(error.exit_code)
