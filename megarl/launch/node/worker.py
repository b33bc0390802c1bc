"""The agent of every node but the first: joins the head, starts the node's Ray, and ends with the job."""

from __future__ import annotations

import asyncio
from pathlib import Path

from megarl.launch.node.agent import FIRST_SIGN_S, Agent, log, log_to
from megarl.launch.node.directory import JobDirectory
from megarl.launch.node.endings import Ended, Outcome, until_the_end
from megarl.launch.node.messages import End, Lost, Start
from megarl.launch.node.ports import candidates
from megarl.launch.node.rendezvous import NotAdmittedError, Peer, find_head


class Worker:
    """The agent of a node that is not the first.

    Args:
        agent: of the node.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._job = agent.job
        self._head: Peer | None = None
        self._directory: JobDirectory | None = None
        self._job_failed = False

    async def run(self) -> int:
        """Takes part in the job until its end; the exit code of the agent, 0 where the head tells it to end."""
        outcome = await until_the_end(self._course)
        if outcome.exit_code:
            log.error(outcome.reason)
            if self._head is not None:
                await self._head.send(Lost(reason=outcome.reason, exit_code=outcome.exit_code))
            if self._directory is not None and outcome.node == self._job.nodes[0]:
                self._directory.write_end(outcome)  # there is nobody else who could
        clean = await self._agent.clean_up(failed=outcome.failed or self._job_failed)
        if self._head is not None:
            self._head.close()
        return outcome.exit_code if clean else 1

    async def _course(self, group: asyncio.TaskGroup) -> None:
        """Waits for the head, starts Ray when it says so, and waits for the end."""
        group.create_task(self._agent.signals())
        self._head = head = await self._connect()
        self._agent.claim_ports()
        self._agent.find_address()
        message = await head.receive()
        if isinstance(message, Start):
            self._directory = self._see(Path(message.log_dir))
            log_to(self._directory.log(self._job.index))
            group.create_task(self._agent.run_ray(message, head.own_address, self._directory))
            message = await head.receive()
        if isinstance(message, End):
            self._job_failed = message.failed
            raise Ended(Outcome(exit_code=0, reason="told to end"))
        await asyncio.sleep(FIRST_SIGN_S)
        name = self._job.nodes[0]
        reason = f"node {name} was lost, on which the driver runs: the connection to its agent has ended"
        raise Ended(Outcome(exit_code=1, reason=reason, node=name))

    def _see(self, log_dir: Path) -> JobDirectory:
        """The job's directory, which the head has made."""
        if not log_dir.is_dir():
            reason = f"node {self._job.name} does not see {log_dir}: run.dir must be where all nodes see the same files"
            raise Ended(Outcome(exit_code=1, reason=reason, node=self._job.name))
        return JobDirectory(log_dir)

    async def _connect(self) -> Peer:
        """Finds the head, within the limit."""
        limit, name = self._agent.options.start_limit_s, self._job.name
        try:
            async with asyncio.timeout(limit):
                return await find_head(self._job, self._agent.token, candidates(self._job.id))
        except NotAdmittedError as error:
            reason = f"node {name} cannot take part: {error}"
        except TimeoutError:
            where = f"{self._job.nodes[0]} ({', '.join(self._job.heads)})"
            reason = f"node {name} found no agent of the job on its first node, {where}, within {limit:g} s"
        raise Ended(Outcome(exit_code=1, reason=reason, node=name))
