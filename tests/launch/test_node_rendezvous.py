"""How agents find each other, on loopback, and whom they do not let in."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import pytest

from megarl.launch.node.messages import End, Lost, Start
from megarl.launch.node.ports import Claim, candidates
from megarl.launch.node.rendezvous import NotAdmittedError, Peer, find_head, listening
from megarl.launch.node.slurm_job import SlurmJob

SECRET = "5" * 32
START = Start(ray_address="10.0.0.1:14702", log_dir="/run/slurm/1-0", devices=8, on_gpus=True, object_store_mib=80)


def task(index: int, job: int = 191) -> SlurmJob:
    return SlurmJob(id=job, attempt=0, index=index, components=(("n1", "n2", "n3"),), launcher="127.0.0.1")


def run(course: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(course, 30))


async def connected(index: int, secret: str = SECRET, job: int = 191) -> Peer:
    return await find_head(task(index, job), secret, candidates(191))


def test_all_nodes_arrive_and_hear_each_other() -> None:
    async def course() -> None:
        claim = Claim(candidates(191))
        others = [asyncio.create_task(connected(index)) for index in (2, 1)]
        await asyncio.sleep(0.3)  # they are there before the head
        async with listening(task(0), SECRET, claim.ports.rendezvous, print) as arrivals:
            peers = {peer.index: peer for peer in [await arrivals.get(), await arrivals.get()]}
            assert set(peers) == {1, 2}
            third, second = await asyncio.gather(*others)
            assert second.own_address == peers[1].own_address == "127.0.0.1"
            for message in (START, End(failed=False)):
                await peers[2].send(message)
                assert await third.receive() == message
            lost = Lost(reason="node n2 is out of paper", exit_code=1)
            await second.send(lost)
            assert await peers[1].receive() == lost
            second.close()
            assert await peers[1].receive() is None
            peers[2].close()
            assert await third.receive() is None
        claim.close()

    run(course())


def test_whoever_does_not_know_the_secret_is_not_let_in_and_both_sides_say_why() -> None:
    async def course() -> None:
        refused: list[str] = []
        claim = Claim(candidates(191))
        async with listening(task(0), SECRET, claim.ports.rendezvous, refused.append) as arrivals:
            with pytest.raises(
                NotAdmittedError, match=r"127.0.0.1 does not let this node in: it has another RAY_AUTH_TOKEN"
            ):
                await connected(1, secret="6" * 32)
            with pytest.raises(NotAdmittedError, match="node 7, which the job does not have"):
                await connected(7)
            peer = await connected(1)
            with pytest.raises(NotAdmittedError, match="node 1, which the job does not have, or has already"):
                await connected(1)
            await peer.send(End(failed=False))
            assert await (await arrivals.get()).receive() == End(failed=False)
            assert arrivals.empty()
        assert len(refused) == 3
        assert refused[0].startswith("127.0.0.1 was not let in: it has another RAY_AUTH_TOKEN")
        claim.close()

    run(course())


def test_a_head_of_another_job_is_passed_over() -> None:
    async def course() -> None:
        first, second = Claim(candidates(191)), Claim(candidates(191))
        async with (
            listening(task(0, job=418), "7" * 32, first.ports.rendezvous, print) as others,
            listening(task(0), SECRET, second.ports.rendezvous, print) as arrivals,
        ):
            assert candidates(418) == candidates(191), "the numbers of these jobs give the same ports"
            await connected(1)
            assert (await arrivals.get()).index == 1
            assert others.empty()
        for claim in (first, second):
            claim.close()

    run(course())


def test_somebody_who_takes_the_ports_and_does_not_know_the_secret_is_not_believed() -> None:
    async def course() -> None:
        claim = Claim(candidates(191))

        async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b'{"job": 191, "challenge": "0"}\n')
            await reader.readline()
            writer.write(b'{"proof": "0"}\n')

        server = await asyncio.start_server(pretend, port=claim.ports.rendezvous)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(connected(1), 1.0)
        server.close()
        claim.close()

    run(course())


NONSENSE = (
    b"",
    b"\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"[1]\n",
    b'{"index": "1"}\n',
    '{"proof": "é"}\n'.encode(),
    b"x" * 200_000,
)


@pytest.mark.parametrize("said", NONSENSE)
def test_nonsense_on_the_port_changes_nothing(said: bytes) -> None:
    async def course() -> None:
        refused: list[str] = []
        claim = Claim(candidates(191))
        async with listening(task(0), SECRET, claim.ports.rendezvous, refused.append) as arrivals:
            reader, writer = await asyncio.open_connection("127.0.0.1", claim.ports.rendezvous)
            writer.write(said)
            writer.write_eof()
            await connected(1)
            assert (await arrivals.get()).index == 1
            with suppress(ConnectionResetError):
                await reader.read()  # to the end of the connection
            assert len(refused) == (b'"proof"' in said), "of whoever offers no proof nothing is told"
            writer.close()
        claim.close()

    run(course())
