"""What every agent has, the head's and the others': its node's means, and the end of all that it starts there."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import secrets
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megarl.cluster.cleanup import MARK
from megarl.cluster.ray_node import ENVIRONMENT, STARTED, RayNode, new_directory
from megarl.launch.node.addresses import address_of, interface_of
from megarl.launch.node.children import Child
from megarl.launch.node.directory import JobDirectory
from megarl.launch.node.endings import Ended, Outcome
from megarl.launch.node.gpus import lack_of_gpus
from megarl.launch.node.guard import Guard
from megarl.launch.node.messages import Start
from megarl.launch.node.ports import Claim, Ports, candidates
from megarl.launch.node.rendezvous import reachable
from megarl.launch.node.scrub import scrubbed
from megarl.launch.node.slurm_job import SlurmJob

_TOKEN, _LEAST_TOKEN = "RAY_AUTH_TOKEN", 16
_RAY_STARTS = 3
FIRST_SIGN_S = 1.0
"""What looks like a node's failure may be its share of a signal that the whole job gets, this node a moment later."""

log = logging.getLogger("megarl.launch.node")


def token_of(environment: Mapping[str, str]) -> str:
    """The job's secret.

    Raises:
        ValueError: it is not there, or easily guessed.
    """
    token = environment.get(_TOKEN, "")
    if len(token) < _LEAST_TOKEN:
        raise ValueError(
            f"{_TOKEN} must be a secret of the job's own, of {_LEAST_TOKEN} characters or more: before srun, "
            f"export {_TOKEN}=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')"
        )
    return token


def _allow_open_files() -> None:
    """Slurm passes on the soft limit of the shell that submits, often 1024; Ray raises it in drivers, not in nodes."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def name_messages(name: str) -> None:
    """Has messages of this node begin with its name, on standard error, which all nodes of a job share."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(logging.Formatter(f"[{name}] %(message)s"))


def log_to(path: Path) -> None:
    """Has what the agent says go to a file, too."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log.addHandler(handler)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the agent is to do.

    Args:
        program: that is megarl.
        command: of it, that the driver runs.
        config: path of the run's configuration.
        overrides: of the configuration.
        interface: network interface of the run; None is that of the route between the nodes.
        start_limit_s: seconds for the nodes to come together, and again for Ray to start on them.
    """

    program: tuple[str, ...] = (sys.executable, "-m", "megarl")
    command: str
    config: str
    overrides: tuple[str, ...]
    interface: str | None
    start_limit_s: float


class Agent:
    """A node's ports, directory, environment and guard, and its Ray; ``clean_up`` ends everything.

    Args:
        job: of the node.
        options: of the agent.
        token: of the job.

    """

    def __init__(self, job: SlurmJob, options: Options, token: str) -> None:
        self.job, self.options, self.token = job, options, token
        self._address: str | None = None
        self._claim: Claim | None = None
        _allow_open_files()
        self._directory = new_directory()
        clean = scrubbed(os.environ)
        mark = secrets.token_hex(8)
        self._guard = Guard(mark, self._directory, clean)
        own = {MARK: mark, "TMPDIR": self._directory, "RAY_AUTH_MODE": "token", _TOKEN: token}
        self.environment = {**clean, **ENVIRONMENT, **own}
        self._stopped_by: asyncio.Queue[signal.Signals] = asyncio.Queue()

    def listen_for_signals(self) -> None:
        """From here on a signal does not end the agent: it ends the job, in order, and further ones change nothing."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stopped_by.put_nowait, number)

    @property
    def ports(self) -> Ports:
        """Of the job on this node, once they are claimed."""
        assert self._claim is not None
        return self._claim.ports

    def claim_ports(self) -> None:
        """Takes the first block of ports that is free; where none is, the job ends."""
        try:
            self._claim = Claim(candidates(self.job.id))
        except OSError as error:
            raise self._cannot_take_part(error, exit_code=1) from None

    def find_address(self) -> None:
        """Looks for the interface that the run is to use; where it is not there, the job ends."""
        try:
            self._address = address_of(self.options.interface) if self.options.interface is not None else None
        except ValueError as error:
            raise self._cannot_take_part(error, exit_code=2) from None

    def _cannot_take_part(self, error: Exception, exit_code: int) -> Ended:
        reason = f"node {self.job.name} cannot take part: {error}"
        return Ended(Outcome(exit_code=exit_code, reason=reason, node=self.job.name))

    async def signals(self) -> None:
        """Waits for a signal, which ends the job."""
        number = await self._stopped_by.get()
        raise Ended(Outcome(exit_code=128 + number, reason=f"node {self.job.name} got {number.name}"))

    async def run_ray(self, start: Start, address: str, directory: JobDirectory) -> None:
        """Runs this node's Ray; its end ends the job.

        What Ray consists of may come from file systems that are slow at first, and Ray gives its parts 30 seconds: a
        start that fails is tried again.

        Args:
            start: what the head says of it.
            address: of this machine, on the route to the other nodes.
            directory: of the job.
        """
        name = self.job.name
        lack = lack_of_gpus(start.devices, self.environment) if start.on_gpus else None
        if lack is not None:
            raise Ended(Outcome(exit_code=2, reason=f"node {name} lacks GPUs: {lack}", node=name))
        self._guard.keep_logs(directory.ray_logs(self.job.index))
        command, log_file = self._ray_node(start, self._address or address).command(), directory.log(self.job.index)
        told = ""
        for _ in range(_RAY_STARTS):
            if self.job.index > 0:
                await reachable(start.ray_address)
            ray = await Child.start(command, self.environment, log_file)
            code = await ray.wait()
            if STARTED.encode() in ray.tail:
                told = f"its Ray has ended with exit code {code}; see {log_file}"
                break
            told = f"its Ray did not start: {ray.last_line}"
            log.warning(told)
        await asyncio.sleep(FIRST_SIGN_S)
        raise Ended(Outcome(exit_code=1, reason=f"node {name} was lost: {told}", node=name))

    def _ray_node(self, start: Start, address: str) -> RayNode:
        """Also says which interface it uses to what runs there."""
        interface = self.options.interface or interface_of(address)
        if interface is not None:
            self.environment.setdefault("GLOO_SOCKET_IFNAME", interface)
            self.environment.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # this one, and none that begins alike
        return RayNode(
            index=self.job.index,
            name=self.job.name,
            address=address,
            head=start.ray_address,
            ports=self.ports.ray,
            devices=start.devices,
            object_store_mib=start.object_store_mib,
            directory=self._directory,
        )

    def ray_address(self, address: str) -> str:
        """Host and port of a Ray head on this node.

        Args:
            address: of this machine, on the route to the other nodes.
        """
        return f"{self._address or address}:{self.ports.ray[0]}"

    async def clean_up(self, *, failed: bool) -> bool:
        """Ends everything that the agent has started, and removes what that leaves; whether nothing is left.

        Args:
            failed: whether the logs of the node's Ray are kept.
        """
        if not failed:
            self._guard.keep_logs(None)
        clean = await asyncio.to_thread(self._guard.finish)
        if self._claim is not None:
            self._claim.close()
        if not clean:
            log.error("something of the job is left on this node: the message above says what")
        return clean
