"""How the agents of a job find each other: the first node's listens, the others connect, both prove the job's secret.

A connection is kept for the whole job. That it ends is how each side learns, at once, that the other is gone; of a
machine that vanishes without a word, TCP's own probes tell within half a minute. Addresses are IPv4, as Ray's.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from megarl.launch.node.lines import Lines
from megarl.launch.node.messages import Message, decoded, encoded
from megarl.launch.node.ports import Ports
from megarl.launch.node.slurm_job import SlurmJob

_ANSWER_S = 10.0
_PAUSE_S = 0.2


class NotAdmittedError(ConnectionError):
    """The head of this very job lets this node not take part."""


class _RefusedError(ConnectionError):
    """An agent of the job may not take part."""


class Peer:
    """A connection to another agent of the job, which has proved that it is one.

    Args:
        lines: of the connection.
        index: of the other's node.
    """

    def __init__(self, lines: Lines, index: int) -> None:
        self._lines = lines
        self.index = index
        self.own_address = lines.own_address

    async def send(self, message: Message) -> None:
        """Tells the other; that it is gone is told to who receives."""
        await self._lines.send(encoded(message))

    async def receive(self) -> Message | None:
        """Waits for a message; None where the connection has ended."""
        fields = await self._lines.receive()
        return decoded(fields) if fields else None

    def close(self) -> None:
        """Ends the connection."""
        self._lines.close()


@asynccontextmanager
async def listening(
    job: SlurmJob, secret: str, port: int, refused: Callable[[str], None]
) -> AsyncIterator[asyncio.Queue[Peer]]:
    """Lets the other nodes of the job connect; each arrives once.

    Args:
        job: whose other nodes may connect.
        secret: of the job.
        port: to listen on.
        refused: is told of whom the head did not let in, and why.
    """
    arrivals: asyncio.Queue[Peer] = asyncio.Queue()
    connected: set[int] = set()

    async def arrive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = Lines(reader, writer)
        try:
            async with asyncio.timeout(_ANSWER_S):
                index = await _let_in(lines, job, secret, connected)
        except _RefusedError as error:
            refused(f"{lines.other_address} was not let in: {error}")
            lines.close()
            return
        except (ConnectionError, TimeoutError):  # whoever looks which ports are open, or is of another job
            lines.close()
            return
        connected.add(index)
        arrivals.put_nowait(Peer(lines, index))

    server = await asyncio.start_server(arrive, port=port, family=socket.AF_INET)
    try:
        yield arrivals
    finally:
        server.close()


async def find_head(job: SlurmJob, secret: str, blocks: Sequence[Ports]) -> Peer:
    """Connects to the head, which may not listen yet: tries until it does, or is cancelled.

    Args:
        job: of both.
        secret: of the job.
        blocks: of which the head has one.

    Raises:
        NotAdmittedError: the head does not let this node in.
    """
    while True:
        for ports in blocks:  # nearly always the first, so that an address which swallows all costs one timeout
            for host in job.heads:
                try:
                    async with asyncio.timeout(_ANSWER_S):
                        return await _connected(host, ports.rendezvous, job, secret)
                except NotAdmittedError:
                    raise
                except (OSError, TimeoutError):
                    continue
        await asyncio.sleep(_PAUSE_S)


async def reachable(address: str) -> None:
    """Waits until somebody listens there.

    Args:
        address: host and port.
    """
    host, _, port = address.rpartition(":")
    while True:
        try:
            async with asyncio.timeout(_ANSWER_S):
                _, writer = await asyncio.open_connection(host, int(port), family=socket.AF_INET)
        except (OSError, TimeoutError):
            await asyncio.sleep(_PAUSE_S)
        else:
            writer.close()
            return


async def _let_in(lines: Lines, job: SlurmJob, secret: str, connected: set[int]) -> int:
    """The head's side of a connection's beginning; the index of the other node."""
    challenge = secrets.token_hex(16)
    await lines.send({"job": job.id, "challenge": challenge})
    answer = await lines.receive()
    if "proof" not in answer:
        raise ConnectionError("no agent of this job")
    index: Any = answer.get("index")
    if not _is_proof(answer, secret, challenge, index):
        reason = "it has another RAY_AUTH_TOKEN: make one for the job, in the batch script, before srun"
    elif index not in range(1, len(job.nodes)) or index in connected:
        reason = f"it says that it is node {index}, which the job does not have, or has already"
    else:
        await lines.send({"proof": _proof(secret, str(answer.get("challenge")), 0)})
        return index
    await lines.send({"refused": reason})
    raise _RefusedError(reason)


async def _connected(host: str, port: int, job: SlurmJob, secret: str) -> Peer:
    """The other side of it."""
    lines = Lines(*await asyncio.open_connection(host, port, family=socket.AF_INET))
    try:
        greeting = await lines.receive()
        if greeting.get("job") != job.id:
            raise ConnectionError("somebody else's")
        challenge = secrets.token_hex(16)
        proof = _proof(secret, str(greeting.get("challenge")), job.index)
        await lines.send({"index": job.index, "proof": proof, "challenge": challenge})
        answer = await lines.receive()
        if "refused" in answer:
            raise NotAdmittedError(f"the head at {host} does not let this node in: {answer['refused']}")
        if not _is_proof(answer, secret, challenge, 0):
            raise ConnectionError("somebody who does not know the secret")
        return Peer(lines, 0)
    except BaseException:
        lines.close()
        raise


def _is_proof(answer: dict[str, Any], secret: str, challenge: str, index: object) -> bool:
    """Whether an answer has the proof; anybody may have sent it, and anything."""
    return hmac.compare_digest(str(answer.get("proof")).encode(), _proof(secret, challenge, index).encode())


def _proof(secret: str, challenge: str, index: object) -> str:
    """What only somebody who knows the secret can answer to a challenge, as the node of this index."""
    return hmac.digest(secret.encode(), f"{index}:{challenge}".encode(), "sha256").hex()
