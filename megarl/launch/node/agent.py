"""The agent of each node of a job: starts the node's Ray, and ends everything that it has started.

The nodes share the job's directory: the head publishes Ray's address in it, and the node that ends
the job writes why. Ray knows which nodes are alive, and srun waits for all agents.
"""

from __future__ import annotations

import logging
import math
import os
import resource
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from megarl.cluster.cleanup import MARK, Guard
from megarl.cluster.ray_node import ENVIRONMENT, START_HOOK, STARTED, RayNode, new_directory
from megarl.config import ConfigError, Problem, RunConfig, load
from megarl.config.inheritance import merged
from megarl.config.schema import TrainingRun
from megarl.errors import PreemptedError
from megarl.launch.node.job_directory import JobDirectory, JobEnded
from megarl.launch.node.logged_process import LoggedProcess
from megarl.launch.node.network import (
    PortBlock,
    address_of,
    address_towards,
    interface_of,
    is_reachable,
    port_blocks,
)
from megarl.launch.node.slurm_job import SlurmJob, clean_env, missing_gpus
from megarl.launch.request import JOB_RAY, other_ray, unwritable

_TOKEN = "RAY_AUTH_TOKEN"
_TOKEN_LENGTH = 16
_RAY_STARTS = 3  # attempts: Ray gives its processes 30 seconds to start, and a cold file system may be slower
_REFUSED = "InvalidAuthToken"
"""In what Ray prints if it has another secret than the head's, which no attempt changes."""
_WORKER_RAY = {"RAY_gcs_rpc_server_reconnect_timeout_s": "25"}
"""A node's Ray ends when the head has not answered for this long; Ray's default is a minute."""
_POLL_S = 0.1
DIRECTORY_POLL_S = 1.0
SIGNAL_S = 1.0
"""A node's failure may be due to a signal to the whole job, which other nodes get a moment later."""
DRIVER_GRACE_S = 15.0

log = logging.getLogger("megarl.launch.node")


def token_of(environment: Mapping[str, str]) -> str:
    """Returns the job's secret. Raises ValueError if it is missing or short."""
    token = environment.get(_TOKEN, "")
    if len(token) < _TOKEN_LENGTH:
        raise ValueError(
            f"{_TOKEN} must be a secret of the job's own, of {_TOKEN_LENGTH} characters or more: before srun, "
            f"export {_TOKEN}=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')"
        )
    return token


@dataclass(frozen=True, kw_only=True)
class AgentOptions:
    """The agent's command line; the limit is for the nodes to find each other, and again to start Ray."""

    program: tuple[str, ...] = (sys.executable, "-m", "megarl")
    command: str
    config: str
    overrides: tuple[str, ...]
    interface: str | None
    start_limit_s: float


class Agent:
    """A node's ports, environment, guard and Ray: the base class of head and workers."""

    directory: JobDirectory
    environment: Mapping[str, str]
    _temporary: str
    _ray_node: RayNode

    def __init__(self, job: SlurmJob, options: AgentOptions, token: str) -> None:
        self.job = job
        self.options = options
        self._token = token
        self._guard: Guard | None = None
        self._ports: PortBlock | None = None
        self._ray: LoggedProcess | None = None
        self._signals: list[signal.Signals] = []
        self._grace_s = 0.0
        self._patience = 0.0  # monotonic seconds until which the run may save after the first signal
        self._ray_starts = 0
        self._next_look = 0.0
        # Slurm passes on the soft limit of the shell that submits, often 1024; Ray raises it in drivers, not in nodes.
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._note_signal)

    def _run_job(self) -> NoReturn:
        """Does this node's part of the job; raises JobEnded."""
        raise NotImplementedError

    def _lets_save(self) -> bool:
        """Whether a run is there that may save after a signal; the head passes the signal on to it."""
        raise NotImplementedError

    def _end(self, end: JobEnded) -> int:
        """Ends the job on this node; returns the exit code."""
        raise NotImplementedError

    def _note_signal(self, number: int, _: object) -> None:
        self._signals.append(signal.Signals(number))
        if self._signals == [signal.SIGUSR1]:
            self._patience = math.inf
        elif self._signals == [signal.SIGTERM] and self._grace_s:
            self._patience = time.monotonic() + self._grace_s + DRIVER_GRACE_S

    def _is_patient(self) -> bool:
        """Whether the run may still save: after the first signal, nothing but SIGUSR1 may come."""
        again = set(self._signals[1:]) - {signal.SIGUSR1}
        return not again and time.monotonic() < self._patience and self._lets_save()

    def _stopped(self) -> JobEnded:
        first = self._signals[0]
        number = signal.SIGINT if first == signal.SIGINT else signal.SIGTERM
        return JobEnded(128 + number, f"node {self.job.name} got {first.name}")

    @property
    def joined(self) -> bool:
        """Whether this node has joined the job of the head."""
        return self._guard is not None

    def run(self) -> int:
        """Runs this node's part until the job ends; returns the exit code."""
        try:
            self._run_job()
        except JobEnded as end:
            return self._end(end)
        except Exception as error:
            log.exception("the node agent itself has failed")
            reason = f"the node agent itself has failed: {error!r}"
            return self._end(JobEnded(1, reason))

    def wait(
        self,
        condition: Callable[[], object],
        limit_s: float = math.inf,
        *,
        poll_s: float = _POLL_S,
    ) -> bool:
        """Waits for a condition; returns False after the limit. Raises JobEnded if the job ends meanwhile."""
        deadline = time.monotonic() + limit_s
        while not condition():
            self._look()
            if time.monotonic() > deadline:
                return False
            time.sleep(poll_s)
        return True

    def _pause(self, seconds: float) -> None:
        self.wait(lambda: False, seconds)

    def _look(self) -> None:
        """Raises JobEnded after a signal, if another node has ended the job, or if this node's Ray has ended."""
        if self._signals and not self._is_patient():
            raise self._stopped()
        if self.joined and time.monotonic() > self._next_look:
            self._next_look = time.monotonic() + DIRECTORY_POLL_S
            end = self.directory.end()
            if end is not None:
                raise end
        if self._ray is not None:
            code = self._ray.exit_code
            if code is not None:
                self._ray_ended(self._ray, code)

    def _load_config(self) -> RunConfig:
        """Reads the configuration, whose nodes must be the job's, and opens the job's directory."""
        path = self.options.config
        overrides = self.options.overrides
        nodes = len(self.job.nodes)
        try:
            raw, _ = merged(Path(path), overrides)
            problems = other_ray(raw)
            config = load(path, [*overrides, JOB_RAY])
            if config.cluster.nodes != nodes:
                rule = f"the job's nodes, {nodes}"
                fix = f"set cluster.nodes={nodes}, or start the job on others"
                problems.append(Problem("cluster.nodes", str(config.cluster.nodes), rule, fix))
            if problems:
                raise ConfigError(problems, path)
        except ConfigError as error:
            # The head reports it; a worker does so only if it does not see the file.
            reported = self.job.index > 0 and os.path.exists(path)
            raise JobEnded(0 if reported else 2, str(error)) from None
        try:
            self.directory = JobDirectory(config.run.dir, self.job)
        except OSError as error:
            refused = ConfigError([unwritable(config.run.dir, error)], path)
            raise JobEnded(2, str(refused), self.job.name) from None
        if isinstance(config.run, TrainingRun):
            self._grace_s = config.run.grace_period
        return config

    def _join(self) -> None:
        """Opens the agent's log, by which the head sees that this node is there, and starts the guard."""
        handler = logging.FileHandler(self.directory.log(self.job.index))
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        log.addHandler(handler)
        clean = clean_env(os.environ)
        mark = secrets.token_hex(8)
        self._temporary = new_directory()
        self._guard = Guard(mark, self._temporary, clean, self.directory.ray_logs(self.job.index))
        self.environment = {
            **clean,
            **ENVIRONMENT,
            MARK: mark,
            "TMPDIR": self._temporary,
            "RAY_AUTH_MODE": "token",
            _TOKEN: self._token,
        }

    def _claim(self, find_address: Callable[[], str]) -> tuple[str, range]:
        """Returns this node's address, by default that of `find_address`, and its ports."""
        name = self.job.name
        interface = self.options.interface
        try:
            self._ports = PortBlock(port_blocks(self.job.id))
            address = find_address() if interface is None else address_of(interface)
            return address, self._ports.ports
        except (OSError, ValueError) as error:
            code = 2 if isinstance(error, ValueError) else 1
            raise JobEnded(code, f"node {name} cannot take part: {error}", name) from None

    def _start_ray(self, config: RunConfig, head: str, address: str, ports: range) -> None:
        """Starts this node's Ray; `head` is HOST:PORT of Ray's head."""
        name = self.job.name
        devices = config.cluster.devices_per_node
        if config.cluster.device == "cuda":
            lack = missing_gpus(devices, self.environment)
            if lack is not None:
                raise JobEnded(2, f"node {name} lacks GPUs: {lack}", name)
        interface = self.options.interface or interface_of(address)
        if interface:
            # The = excludes interfaces whose names only begin with this one.
            defaults = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
            self.environment = {**defaults, **self.environment}
        self._ray_node = RayNode(
            index=self.job.index,
            name=name,
            address=address,
            head=head,
            ports=ports,
            devices=devices,
            object_store_mib=config.cluster.object_store_mib,
            directory=self._temporary,
        )
        self._start_ray_process()

    def _start_ray_process(self) -> None:
        node = self._ray_node
        self.wait(lambda: node.index == 0 or is_reachable(node.head))
        self._ray_starts += 1
        environment = {**self.environment, **START_HOOK}
        if node.index:
            environment |= _WORKER_RAY
        self._ray = LoggedProcess(node.command(), environment, self.directory.log(node.index))

    def _ray_ended(self, ray: LoggedProcess, code: int) -> None:
        """Restarts this node's Ray if it did not come up; otherwise raises JobEnded."""
        self._ray = None
        name = self.job.name
        node = self._ray_node
        if STARTED in ray.output:
            log_file = self.directory.log(node.index)
            reason = f"its Ray has ended with exit code {code}; see {log_file}"
        else:
            reason = f"its Ray did not start: {ray.last_message}"
            log.warning(reason)
            if self._ray_starts < _RAY_STARTS and _REFUSED not in ray.output:
                return self._start_ray_process()
        if not self._signals:
            self._pause(SIGNAL_S)
        if self._signals:  # to all processes
            raise self._stopped()
        if node.index > 0 and not is_reachable(node.head):
            name = self.job.nodes[0]
            reason = "the driver runs there, and its Ray does not answer"
        raise JobEnded(1, f"node {name} was lost: {reason}", name)

    def _clean_up(self, *, failed: bool) -> bool:
        """Ends all processes of the agent and removes their files; returns whether nothing is left."""
        clean = self._guard is None or self._guard.finish(failed=failed)
        if self._ports is not None:
            self._ports.close()
        if not clean:
            log.error("something of the job is left on this node: the message above says what")
        return clean


class Worker(Agent):
    """The agent of every node but the first: its Ray joins the head's."""

    def _run_job(self) -> None:
        config = self._load_config()
        directory = self.directory
        limit = self.options.start_limit_s
        head = self.job.nodes[0]
        lost = f"node {self.job.name} sees nothing of the first node, {head}, in {directory.path}"
        if not self.wait(lambda: directory.ray_address() is not None, limit, poll_s=DIRECTORY_POLL_S):
            fix = "does it run, and is run.dir on a file system that all nodes share?"
            raise JobEnded(1, f"{lost} within {limit:g} s: {fix}", self.job.name)
        self._join()
        # The head has the limit to check the configuration, and again to wait for all nodes.
        if not self.wait(directory.ray_address, 2 * limit, poll_s=DIRECTORY_POLL_S):
            raise JobEnded(1, f"{lost} that would be its Ray within {2 * limit:g} s", head)
        ray = str(directory.ray_address())
        host = ray.rpartition(":")[0]
        address, ports = self._claim(lambda: address_towards(host))
        self._start_ray(config, ray, address, ports)
        while True:
            self._pause(math.inf)  # until it raises

    def _lets_save(self) -> bool:
        return self.joined

    def _end(self, end: JobEnded) -> int:
        failed = end.failed
        if self.joined:
            # Then a signal to the whole job has arrived, and another node has written its reason.
            time.sleep(SIGNAL_S)
            written = self.directory.end()
            saved = written is not None and written.exit_code in (0, PreemptedError.exit_code)
            if self._signals and not saved:
                end = replace(self._stopped(), node=self.job.name)
            if written is None:
                self.directory.write_end(end)
            elif saved or not self._signals:
                end = replace(end, exit_code=0)
                failed = written.failed
        if end.exit_code:
            log.error(end.reason)
        if not self._clean_up(failed=failed):
            return 1
        return end.exit_code
