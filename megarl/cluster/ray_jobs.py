"""Runs as jobs of a Ray cluster that is up already: submitted to its dashboard, followed, stopped."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient
from ray.util.state import list_nodes

from megarl.cluster.driver_environment import environment
from megarl.cluster.placement import DEVICE
from megarl.config.schema import Cluster
from megarl.errors import RunError

_CONNECT_S = 10.0
_LOST_S = 60.0
"""How long the dashboard may be away while a job is followed: a forwarded port is made anew."""
_POLL_S = 1.0
_MOST_NODES = 1000
_GRACE_S = 60
"""For a driver that is stopped to end what it started; Ray's own 3 s are too few (ray 2.60, job_supervisor.py)."""


class RayJobs:
    """The job server of a Ray cluster, which is a part of its dashboard.

    A cluster with RAY_AUTH_MODE=token answers where this process has the same mode and token.

    Args:
        address: of the dashboard, as ``http://10.0.0.1:8265``.

    Raises:
        RunError: no dashboard answers there, or it does not know this process.
    """

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        _quiet()
        _reach(self.address)
        with self._answers():
            self._client = JobSubmissionClient(self.address)

    def check(self, cluster: Cluster) -> None:
        """Holds a run's devices against those that the living nodes offer.

        Raises:
            RunError: they are too few.
        """
        with self._answers():
            states: list[Any] = list_nodes(address=self.address, limit=_MOST_NODES)
        offers = [
            (state.node_name, int(state.resources_total.get(DEVICE, 0))) for state in states if state.state == "ALIVE"
        ]
        needed = cluster.devices_per_node
        if sum(offer >= needed for _, offer in offers) < cluster.nodes:
            has = ", ".join(f"{node}: {offer}" for node, offer in sorted(offers)) or "none yet"
            raise RunError(
                f"the run needs {cluster.nodes} x {needed} devices, and the nodes at {self.address} offer {has}: start "
                f"every node with ray start --resources '{{\"{DEVICE}\": {needed}}}', or lower cluster.nodes or "
                "cluster.devices_per_node"
            )

    def submit(self, name: str, entrypoint: str, package: Path | None) -> None:
        """Submits a job, which the cluster's head starts at once.

        Args:
            name: of the job; no other job of the cluster may have had it.
            entrypoint: line of shell.
            package: a zip file, among whose files the job starts; None starts it where the head was started.

        Raises:
            RunError: the cluster does not take it.
        """
        env: dict[str, Any] = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(_GRACE_S)}}
        if package is not None:
            env["working_dir"] = str(package)
        try:
            self._client.submit_job(entrypoint=entrypoint, submission_id=name, runtime_env=env)
        except Exception as error:  # whatever its libraries raise
            raise RunError(f"{self.address}: the cluster did not take the job: {error}") from error

    def follow(self, name: str, write: Callable[[str], None]) -> int:
        """Writes what a job prints until it ends; an interrupt, or SIGTERM, stops the job, and waits for its end.

        A second one does not wait.

        Returns:
            The exit code: that of the job, 128 and the signal's number where a signal ended it.

        Raises:
            RunError: the job could not run, or the dashboard does not answer any more.
        """
        return asyncio.run(self._follow(name, _Log(write)))

    async def _follow(self, name: str, log: _Log) -> int:
        loop = asyncio.get_running_loop()
        stopped, again = (loop.create_future() for _ in range(2))
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, _note, (stopped, again), number)
        stopping = asyncio.create_task(self._stop(name, log, stopped))
        ending = asyncio.create_task(self._end(name, log))
        await asyncio.wait((ending, again), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not ending.done():
            ending.cancel()
            raise RunError(f"{name} may go on: ray job stop {name} --address {self.address}")
        job = ending.result()
        return 128 + stopped.result() if stopped.done() and job.status == JobStatus.STOPPED else _exit_code(job)

    async def _stop(self, name: str, log: _Log, stopped: asyncio.Future[int]) -> None:
        """Waits for a signal, and stops the job, at once or when the connection is there again."""
        await stopped
        grace = f"which has {_GRACE_S} seconds to end what it started"
        log.write(f"stopping {name}, {grace}; once more, and nobody waits for it\n")
        while True:
            with suppress(Exception):  # whatever its libraries raise without a connection
                await asyncio.to_thread(self._client.stop_job, name)
                return
            await asyncio.sleep(_POLL_S)

    async def _end(self, name: str, log: _Log) -> JobDetails:
        """Writes what the job prints, and waits for its end; a connection that is lost is made anew."""
        lost = math.inf
        while True:
            log.begin()
            try:
                async for text in self._client.tail_job_logs(name):
                    log.take(text)
                    lost = math.inf
                job = self._client.get_job_info(name)
            except Exception as error:  # whatever its libraries raise without a connection
                lost = min(lost, time.monotonic())
                if time.monotonic() > lost + _LOST_S:
                    raise RunError(
                        f"{self.address} does not answer any more ({error}); if the cluster is up, {name} goes on: "
                        f"ray job logs {name} --address {self.address} --follow"
                    ) from error
            else:
                lost = math.inf
                if job.status.is_terminal():
                    return job
            await asyncio.sleep(_POLL_S)

    @contextmanager
    def _answers(self) -> Generator[None]:
        """Says what to do where the dashboard refuses; RAY_ADDRESS does not count, the address was given."""
        try:
            with environment({"RAY_ADDRESS": self.address, "RAY_API_SERVER_ADDRESS": self.address}):
                yield
        except AuthenticationError as error:
            raise RunError(
                f"{self.address}: the cluster wants its token: export RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN, or "
                "RAY_AUTH_TOKEN_PATH of a file that holds it, as on the cluster's head"
            ) from error
        except Exception as error:  # whatever its libraries raise at what is no dashboard
            raise RunError(f"{self.address}: no job server of Ray answers there ({error}); {_FIX}") from error


class _Log:
    """What a job prints, of which every connection tells all from the beginning.

    Args:
        write: takes what is new.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self.write = write
        self._written = self._told = 0

    def begin(self) -> None:
        """A new connection is made."""
        self._told = 0

    def take(self, text: str) -> None:
        """What the connection tells next."""
        new = text[max(0, self._written - self._told) :]
        self._told += len(text)
        if new:
            self.write(new)
            self._written = self._told


_FIX = (
    "give the address of the head's dashboard, http://HEAD:8265; the head needs pip install 'ray[default]' and is "
    "started with ray start --head --dashboard-host=0.0.0.0"
)


def _reach(address: str) -> None:
    """Whether something listens at the address, within seconds.

    Raises:
        RunError: nothing does.
    """
    place = urlsplit(address)
    port = place.port or (443 if place.scheme == "https" else 80)
    try:
        socket.create_connection((place.hostname, port), timeout=_CONNECT_S).close()
    except OSError as error:
        raise RunError(f"{address}: nothing listens there ({error}); {_FIX}") from error


def _note(signals: Sequence[asyncio.Future[int]], number: int) -> None:
    """Keeps a signal in the first place that is free."""
    for place in signals:
        if not place.done():
            place.set_result(number)
            return


def _exit_code(job: JobDetails) -> int:
    """The exit code of a job that has ended.

    Raises:
        RunError: it has none, as its driver was not started, or was lost with its node.
    """
    if job.status == JobStatus.SUCCEEDED:
        return 0
    if job.status == JobStatus.STOPPED:
        return 128 + signal.SIGTERM
    if job.driver_exit_code is None:
        raise RunError(f"the job did not run to an end: {job.message}")
    return job.driver_exit_code if job.driver_exit_code >= 0 else 128 - job.driver_exit_code


def _quiet() -> None:
    """Leaves out what Ray's clients tell of their requests."""
    for handler in logging.getLogger("ray").handlers:
        handler.setLevel(logging.ERROR)
