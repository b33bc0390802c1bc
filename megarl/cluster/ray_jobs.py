"""Submits runs as jobs to a running Ray cluster, follows and stops them, through its dashboard."""

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
"""Time for which the dashboard may be unreachable, such as while a forwarded port reconnects."""
_POLL_S = 1.0
_MOST_NODES = 1000
_GRACE_S = 60
"""Time for a stopped driver to clean up; Ray's default is 3 s (ray 2.60, job_supervisor.py)."""


class RayJobs:
    """The job server of a Ray cluster, a part of its dashboard.

    With RAY_AUTH_MODE=token, the cluster and this process need the same token.

    Args:
        address: URL of the dashboard, such as `http://10.0.0.1:8265`.

    Raises:
        RunError: No dashboard answers at the address, or it rejects the token.
    """

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        for handler in logging.getLogger("ray").handlers:
            handler.setLevel(logging.ERROR)  # without the messages of Ray's clients about their requests
        _reach(self.address)
        with self._answers():
            self._client = JobSubmissionClient(self.address)

    def check(self, cluster: Cluster) -> None:
        """Raises RunError if the living nodes have fewer devices than a run needs."""
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
            name: unique among all jobs of the cluster, past ones included.
            entrypoint: shell command.
            package: zip file with the job's working directory; None for the directory in which the head was started.

        Raises:
            RunError: The cluster rejects the job.
        """
        env: dict[str, Any] = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(_GRACE_S)}}
        if package is not None:
            env["working_dir"] = str(package)
        try:
            self._client.submit_job(entrypoint=entrypoint, submission_id=name, runtime_env=env)
        except Exception as error:  # whatever its libraries raise
            raise RunError(f"{self.address}: the cluster did not take the job: {error}") from error

    def follow(self, name: str, write: Callable[[str], None]) -> int:
        """Writes a job's output until it ends, and returns its exit code: 128 + n where signal n ended it.

        SIGINT or SIGTERM stops the job and waits for its end; a second signal does not wait.

        Raises:
            RunError: The job could not run, or the dashboard does not answer any more.
        """
        return asyncio.run(self._follow(name, _Log(write)))

    async def _follow(self, name: str, log: _Log) -> int:
        loop = asyncio.get_running_loop()
        stopped, again = (loop.create_future() for _ in range(2))
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, _set_first, (stopped, again), number)
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
        """Waits for a signal, and stops the job, as soon as there is a connection."""
        await stopped
        log.write(f"stopping {name}, which has {_GRACE_S} seconds to clean up; a second signal does not wait for it\n")
        while True:
            with suppress(Exception):  # whatever its libraries raise without a connection
                await asyncio.to_thread(self._client.stop_job, name)
                return
            await asyncio.sleep(_POLL_S)

    async def _end(self, name: str, log: _Log) -> JobDetails:
        """Writes the job's output until it ends; reconnects where a connection is lost."""
        lost = math.inf
        while True:
            log.received = 0
            try:
                async for text in self._client.tail_job_logs(name):
                    log.receive(text)
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
        """Turns errors of the dashboard's clients into RunErrors; makes the clients ignore RAY_ADDRESS."""
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
    """Writes a job's output once, although every connection sends it from the beginning and resets `received`."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self.write = write
        self._written = self.received = 0

    def receive(self, text: str) -> None:
        new = text[max(0, self._written - self.received) :]
        self.received += len(text)
        if new:
            self.write(new)
            self._written = self.received


_FIX = (
    "give the address of the head's dashboard, http://HEAD:8265; the head needs pip install 'ray[default]' and is "
    "started with ray start --head --dashboard-host=0.0.0.0"
)


def _reach(address: str) -> None:
    """Raises RunError, within seconds, if nothing listens at the address."""
    url = urlsplit(address)
    port = url.port or (443 if url.scheme == "https" else 80)
    try:
        socket.create_connection((url.hostname, port), timeout=_CONNECT_S).close()
    except OSError as error:
        raise RunError(f"{address}: nothing listens there ({error}); {_FIX}") from error


def _set_first(futures: Sequence[asyncio.Future[int]], number: int) -> None:
    """Sets the first future that is not done."""
    for future in futures:
        if not future.done():
            future.set_result(number)
            return


def _exit_code(job: JobDetails) -> int:
    """Returns the exit code of an ended job; raises RunError if its driver did not start or was lost with its node."""
    if job.status == JobStatus.SUCCEEDED:
        return 0
    if job.status == JobStatus.STOPPED:
        return 128 + signal.SIGTERM
    if job.driver_exit_code is None:
        raise RunError(f"the job did not run to an end: {job.message}")
    return job.driver_exit_code if job.driver_exit_code >= 0 else 128 - job.driver_exit_code
