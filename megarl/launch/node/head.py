"""The agent of the first node: brings the nodes together, runs the driver, and ends the job on all of them."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from megarl.cluster.ray_node import waiting_command
from megarl.config import ConfigError, Problem, RunConfig
from megarl.launch.node.addresses import LOOPBACK
from megarl.launch.node.agent import FIRST_SIGN_S, Agent, log, log_to
from megarl.launch.node.children import Child
from megarl.launch.node.configuration import JOINED, job_configuration
from megarl.launch.node.directory import JobDirectory
from megarl.launch.node.endings import Ended, Outcome, until_the_end
from megarl.launch.node.messages import End, Lost, Start
from megarl.launch.node.rendezvous import Peer, listening

_DRIVER_GRACE_S = 15.0
_DRIVER_LAST_S = 6.0
"""For a node that is lost to be told of: it is why the driver has failed."""
_LATE_S = 60.0
"""For nodes that have not connected yet to hear that the job is at its end."""
_LEAVING_S = 100.0
"""For a node to clean up: longer than its guard has."""


class Head:
    """The agent of the first node.

    Args:
        agent: of the node.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent, self._job, self._options = agent, agent.job, agent.options
        self._began = time.time()
        self._peers: dict[int, Peer] = {}
        self._all_connected = asyncio.Event()
        self._children: list[Child] = []
        self._directory: JobDirectory | None = None

    async def run(self) -> int:
        """Runs the job to its end; its exit code."""
        try:
            self._agent.claim_ports()
        except Ended as error:
            log.error(error)
            await self._agent.clean_up(failed=False)
            return error.outcome.exit_code
        port = self._agent.ports.rendezvous
        async with listening(self._job, self._agent.token, port, log.warning) as self._arrivals:
            outcome = await until_the_end(self._course)
            return await self._end(outcome)

    async def _course(self, group: asyncio.TaskGroup) -> None:
        """Checks the configuration, waits for the nodes, starts Ray on all of them, and runs the driver."""
        group.create_task(self._agent.signals())
        group.create_task(self._receive(group))
        config = self._configuration()
        self._directory = directory = self._open_directory(config.run.dir)
        self._agent.find_address()
        await self._check(directory)
        self._reached("configuration checked")
        await self._all_nodes()
        self._reached("all connected")
        start = await self._start_ray(group, config, directory)
        directory.write_attach(self._job, start.ray_address, self._agent.token)
        await self._all_of_ray(start, directory)
        self._reached("Ray ready")
        raise Ended(await self._drive(start, directory))

    def _configuration(self) -> RunConfig:
        """The run's, of as many nodes as the job has."""
        options = self._options
        try:
            return job_configuration(options.config, options.overrides, len(self._job.nodes))
        except ConfigError as error:
            raise Ended(Outcome(exit_code=2, reason=str(error))) from None

    def _open_directory(self, run_dir: str) -> JobDirectory:
        """The job's directory, which nobody has seen yet."""
        try:
            directory = JobDirectory.of(run_dir, self._job)
            directory.begin()
        except OSError as error:
            rule, fix = f"can be written ({error.strerror})", "choose another run.dir"
            problem = Problem(field="run.dir", value=run_dir, rule=rule, fix=fix)
            raise Ended(Outcome(exit_code=2, reason=str(ConfigError([problem], self._options.config)))) from None
        log_to(directory.log(0))
        directory.reached("agent started", self._began)
        return directory

    async def _check(self, directory: JobDirectory) -> None:
        """Whether the run could be: in a process of its own, which forgets the models and data that it reads."""
        child, limit = await self._start(directory, *self._megarl("plan", "config")), self._options.start_limit_s
        try:
            code = await asyncio.wait_for(child.wait(), limit)
        except TimeoutError:
            reason = f"the check of the configuration, its models and its data has not ended within {limit:g} s"
            raise Ended(Outcome(exit_code=1, reason=reason)) from None
        if code:
            reason = child.tail.decode(errors="replace").strip() or f"megarl plan config ended with exit code {code}"
            raise Ended(Outcome(exit_code=2 if code == 2 else 1, reason=reason))

    async def _receive(self, group: asyncio.TaskGroup) -> None:
        """Watches every node from when it connects."""
        while len(self._peers) < len(self._job.nodes) - 1:
            peer = await self._arrivals.get()
            self._peers[peer.index] = peer
            group.create_task(self._watch(peer))
        self._all_connected.set()

    async def _watch(self, peer: Peer) -> None:
        """Waits for the end of a node, which ends the job."""
        message = await peer.receive()
        await asyncio.sleep(FIRST_SIGN_S)
        name = self._job.nodes[peer.index]
        if isinstance(message, Lost):
            raise Ended(Outcome(exit_code=message.exit_code, reason=message.reason, node=name))
        reason = f"node {name} was lost: the connection to its agent has ended"
        raise Ended(Outcome(exit_code=1, reason=reason, node=name))

    async def _all_nodes(self) -> None:
        """Waits until every node has connected."""
        limit = self._options.start_limit_s
        try:
            await asyncio.wait_for(self._all_connected.wait(), limit)
        except TimeoutError:
            missing = [name for index, name in enumerate(self._job.nodes) if index and index not in self._peers]
            reason = f"no agent has connected from {_nodes(missing)} within {limit:g} s"
            raise Ended(Outcome(exit_code=1, reason=reason, node=missing[0])) from None

    async def _start_ray(self, group: asyncio.TaskGroup, config: RunConfig, directory: JobDirectory) -> Start:
        """Starts Ray here, and tells the others to start theirs."""
        address = self._peers[1].own_address if self._peers else LOOPBACK
        start = Start(
            ray_address=self._agent.ray_address(address),
            log_dir=str(directory.path),
            devices=config.cluster.devices_per_node,
            on_gpus=config.cluster.device == "cuda",
            object_store_mib=config.cluster.object_store_mib,
        )
        group.create_task(self._agent.run_ray(start, address, directory))
        for peer in self._peers.values():
            await peer.send(start)
        return start

    async def _all_of_ray(self, start: Start, directory: JobDirectory) -> None:
        """Waits until every node and device is there."""
        limit = self._options.start_limit_s
        waiting = await self._start(directory, *waiting_command(start.ray_address, start.devices, self._job.nodes))
        try:
            code = await asyncio.wait_for(waiting.wait(), limit)
        except TimeoutError:
            code = None
        told = waiting.last_line
        if code is None:
            node = next((name for name in self._job.nodes if name in re.split(r"[ ,]+", told)), None)
            raise Ended(Outcome(exit_code=1, reason=f"Ray is not ready within {limit:g} s: {told}", node=node))
        if code:
            raise Ended(Outcome(exit_code=1, reason=f"the wait for Ray ended with exit code {code}: {told}"))

    async def _drive(self, start: Start, directory: JobDirectory) -> Outcome:
        """Runs the driver to its end."""
        self._agent.environment["RAY_ADDRESS"] = start.ray_address
        command, log_file = self._megarl(self._options.command), directory.driver_log
        driver = await Child.start(command, self._agent.environment, log_file, sys.stdout.buffer)
        self._children.append(driver)
        directory.reached("driver started")
        code = await driver.wait()
        self._reached("driver ended")
        if code == 0:
            return Outcome(exit_code=0, reason="finished")
        await asyncio.sleep(_DRIVER_LAST_S)
        reason = f"megarl {self._options.command} ended with exit code {code}: {driver.last_message}"
        return Outcome(exit_code=code, reason=reason)

    async def _start(self, directory: JobDirectory, *command: str) -> Child:
        """A child whose output goes to the head's log."""
        child = await Child.start(command, self._agent.environment, directory.log(0))
        self._children.append(child)
        return child

    def _reached(self, stage: str) -> None:
        """Writes when the job has reached a stage, and says so to who reads the job's output meanwhile."""
        assert self._directory is not None
        self._directory.reached(stage)
        log.info("%s after %.1f s", stage, time.time() - self._began)

    def _megarl(self, *command: str) -> list[str]:
        options = self._options
        return [*options.program, *command, options.config, *options.overrides, JOINED]

    async def _end(self, outcome: Outcome) -> int:
        """Tells how the job ends, and ends it on all nodes."""
        if outcome.exit_code:
            log.error(outcome.reason)
        if self._directory is not None:
            self._directory.write_end(outcome)  # now, as there may be no time for it later
        for child in self._children:
            await child.stop(_DRIVER_GRACE_S)
        if not outcome.by_signal:
            await self._hear_late_ones()
        for peer in self._peers.values():
            await peer.send(End(failed=outcome.failed))
        clean, *left = await asyncio.gather(
            self._agent.clean_up(failed=outcome.failed), *map(self._has_left, self._peers.values())
        )
        for name in (name for name in left if name is not None):
            log.error("node %s does not say that it has ended", name)
        if not clean and not outcome.exit_code:
            outcome = Outcome(exit_code=1, reason="processes of the job are left", node=self._job.name)
        self._last_words(outcome)
        return outcome.exit_code

    async def _hear_late_ones(self) -> None:
        """Lets the nodes connect that have not yet, so that they hear that the job is at its end; late ones give up."""
        until_they_give_up = self._began + self._options.start_limit_s - time.time()
        with suppress(TimeoutError):
            async with asyncio.timeout(min(_LATE_S, until_they_give_up)):
                while len(self._peers) < len(self._job.nodes) - 1:
                    peer = await self._arrivals.get()
                    self._peers[peer.index] = peer

    async def _has_left(self, peer: Peer) -> str | None:
        """Waits until a node has cleaned up; its name where it does not say so."""
        try:
            async with asyncio.timeout(_LEAVING_S):
                while await peer.receive() is not None:
                    pass
        except TimeoutError:
            return self._job.nodes[peer.index]
        return None

    def _last_words(self, outcome: Outcome) -> None:
        """What the job's output, and the driver's log, end with."""
        if self._directory is None:
            return
        self._directory.write_end(outcome)
        self._directory.reached("stopped")
        if outcome.exit_code:
            self._directory.add_to_driver_log(outcome.reason)
        log.info("the job has ended with exit code %d; its logs are in %s", outcome.exit_code, self._directory.path)


def _nodes(names: Sequence[str]) -> str:
    return f"node{'s' if len(names) > 1 else ''} {', '.join(names)}"
