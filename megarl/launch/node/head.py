"""The agent of the first node: checks the configuration, publishes its Ray, and runs the driver."""

from __future__ import annotations

import re
import sys
import time
from typing import NoReturn

from megarl.cluster.ray_node import READY, watch_command
from megarl.errors import PreemptedError
from megarl.launch.node.agent import (
    DIRECTORY_POLL_S,
    DRIVER_GRACE_S,
    SIGNAL_S,
    Agent,
    AgentOptions,
    log,
)
from megarl.launch.node.job_directory import JobEnded
from megarl.launch.node.logged_process import LoggedProcess
from megarl.launch.node.network import head_address
from megarl.launch.node.slurm_job import SlurmJob
from megarl.launch.request import JOB_RAY

_ACCOUNT_S = 4.0
_NEWS_S = 8.0
"""For a lost node to write its reason; and, after a failed driver, for the loss of a node to be noticed."""


class Head(Agent):
    """The agent of the first node."""

    def __init__(self, job: SlurmJob, options: AgentOptions, token: str) -> None:
        super().__init__(job, options, token)
        self._began = time.time()
        self._children: list[LoggedProcess] = []
        self._watch: LoggedProcess | None = None
        self._driver: LoggedProcess | None = None
        self._driver_signaled = False

    def _run_job(self) -> NoReturn:
        config = self._load_config()
        directory = self.directory
        directory.begin()
        self._join()
        directory.reached("agent started", self._began)
        address, ports = self._claim(lambda: head_address(self.job))
        self._check_config()
        self._reached("configuration checked")
        self._wait_for_nodes()
        self._reached("all connected")
        ray = f"{address}:{ports[0]}"
        directory.publish_ray(ray)
        self._start_ray(config, ray, address, ports)
        self._wait_for_ray(ray, config.cluster.devices_per_node)
        self._reached("Ray ready")
        self._drive(ray)

    def _lets_save(self) -> bool:
        """Also passes the first signal on to the driver."""
        if self._driver is not None and not self._driver_signaled:
            self._driver_signaled = True
            first = self._signals[0]
            log.info("node %s got %s: the run may save", self.job.name, first.name)
            self._driver.send(first)
        return self._driver_signaled

    def _look(self) -> None:
        """Also raises JobEnded if Ray has lost a node, after waiting for the node's own reason."""
        super()._look()
        if self._watch is not None and self._watch.exit_code is not None:
            name = self._watch.last_message
            self._watch = None
            if name in self.job.nodes:
                self._pause(_ACCOUNT_S)
                raise JobEnded(1, f"node {name} was lost: Ray has lost the connection to it", name)
            log.warning("the watch over the nodes has ended: %s", name)

    def _end(self, end: JobEnded) -> int:
        if end.exit_code:
            log.error(end.reason)
        if self.joined:
            self.directory.write_end(end)  # now, as Slurm may leave no time later
        for child in self._children:
            child.stop(DRIVER_GRACE_S)
        clean = self._clean_up(failed=end.failed)
        if not clean and not end.exit_code:
            end = JobEnded(1, "processes of the job are left", self.job.name)
        if self._signals:
            stopped = self._stopped()
            if stopped.exit_code == end.exit_code:
                end = stopped  # a signal to the whole job, which another node got first
        if self.joined:
            self.directory.write_end(end)
            self.directory.reached("stopped")
            if end.exit_code:
                self.directory.add_to_driver_log(end.reason)
            path = self.directory.path
            log.info("the job has ended with exit code %d; its logs are in %s", end.exit_code, path)
        return end.exit_code

    def _check_config(self) -> None:
        """Checks models and data too, in a process whose memory is freed."""
        child = self._start(self._megarl("plan", "config"))
        limit = self.options.start_limit_s
        if not self.wait(lambda: child.exit_code is not None, limit):
            what = "the check of the configuration, its models and its data"
            raise JobEnded(1, f"{what} has not ended within {limit:g} s")
        if child.exit_code:
            self._pause(SIGNAL_S)
            reason = child.output.strip() or f"megarl plan config ended with exit code {child.exit_code}"
            raise JobEnded(2 if child.exit_code == 2 else 1, reason)

    def _wait_for_nodes(self) -> None:
        nodes = self.job.nodes
        limit = self.options.start_limit_s
        if not self.wait(lambda: not self.directory.missing(), limit, poll_s=DIRECTORY_POLL_S):
            missing = [nodes[index] for index in self.directory.missing()]
            plural = "s" * (len(missing) > 1)
            names = f"node{plural} {', '.join(missing)}"
            raise JobEnded(1, f"no agent has connected from {names} within {limit:g} s", missing[0])

    def _wait_for_ray(self, ray: str, devices: int) -> None:
        """Waits for all nodes and devices; the process that looks for them then watches them."""
        limit = self.options.start_limit_s
        nodes = self.job.nodes
        watch = self._start(watch_command(ray, devices, nodes))

        def is_ready() -> bool:
            return READY in watch.output.splitlines()

        self.wait(lambda: is_ready() or watch.exit_code is not None, limit)
        if not is_ready():
            self._pause(SIGNAL_S)
            message = watch.last_message
            words = re.split(r"[ ,]+", message)
            node = next((name for name in nodes if name in words), None)
            raise JobEnded(1, f"Ray is not ready within {limit:g} s: {message}", node)
        self._watch = watch

    def _drive(self, ray: str) -> NoReturn:
        """Runs the driver; raises JobEnded when it ends."""
        self.environment = {**self.environment, "RAY_ADDRESS": ray}
        driver = self._driver = self._start(self._megarl(self.options.command), driver=True)
        self.directory.reached("driver started")
        self.wait(lambda: driver.exit_code is not None)
        self._reached("driver ended")
        log.info("its exit code is %d", driver.exit_code)
        if not driver.exit_code:
            raise JobEnded(0, "finished")
        if driver.exit_code != PreemptedError.exit_code:
            if self._signals:
                raise self._stopped()
            self._pause(_NEWS_S)
        ended = f"ended with exit code {driver.exit_code}: {driver.last_message}"
        raise JobEnded(driver.exit_code, f"megarl {self.options.command} {ended}")

    def _start(self, command: list[str], *, driver: bool = False) -> LoggedProcess:
        file = self.directory.log(0)
        echo = None
        if driver:
            file = self.directory.driver_log
            echo = sys.stdout.buffer
        child = LoggedProcess(command, self.environment, file, echo)
        self._children.append(child)
        return child

    def _reached(self, stage: str) -> None:
        self.directory.reached(stage)
        log.info("%s after %.1f s", stage, time.time() - self._began)

    def _megarl(self, *command: str) -> list[str]:
        options = self.options
        return [*options.program, *command, options.config, *options.overrides, JOB_RAY]
