"""What the gateway does to whom: other users without a key, who send much or nothing; harnesses that send much."""

from __future__ import annotations

import asyncio
import gzip
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from megarl.conversations.chat_session import TurnLimits
from megarl.conversations.gateway import connections
from megarl.conversations.gateway import gateway as gateway_module
from tests.conversations.gateways import GatewayTest, GatewayWorld, gateway_world
from tests.data.encoded_texts import encoded_lengths

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
MILLION = "abcdefgh " * 111_111


async def connect(world: GatewayWorld, sent: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = world.gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    return reader, writer


async def longest_pause(running: asyncio.Task[Any]) -> float:
    """Returns the longest time, in seconds, for which the event loop stood still until a task was done."""
    longest, last = 0.0, time.monotonic()
    while not running.done():
        await asyncio.sleep(0.005)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    return longest


@pytest.mark.parametrize("many", [False, True], ids=["a text", "many messages"])
async def test_a_chat_that_cannot_fit_is_not_encoded(
    tokenizer: Path, tmp_path: Path, many: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that does not fit; the session goes on."""
    message = {"role": "user", "content": "a" if many else MILLION * 7}
    lengths = encoded_lengths(monkeypatch)
    async with gateway_world(tokenizer, lambda _: "yes", tmp_path, TurnLimits(context=64, turn=8, turns=9)) as world:
        session = await world.session()
        for path, body in (
            (CHAT, {"messages": [message] * (100_000 if many else 1)}),
            ("/v1/completions", {"prompt": MILLION * 7}),
        ):
            status, answer = await session.post(path, body)
            assert (status, "rollout.max_model_len" in answer["error"]["message"]) == (400, True), answer
        assert max(lengths, default=0) < 1000
        assert (await session.post(CHAT, HELLO))[0] == 200
        await session.end()
        session.check_exact()


async def test_others_do_not_wait_for_a_long_text(tokenizer: Path, tmp_path: Path) -> None:
    """One that fits is encoded beside them, as are those of its own session, one after the other."""
    limits = TurnLimits(context=4_000_000, turn=8, turns=9)
    async with gateway_world(tokenizer, lambda _: "yes", tmp_path, limits) as world:
        session = await world.session()
        chat = {"messages": [{"role": "user", "content": MILLION}]}
        begun = time.monotonic()
        asked = [
            asyncio.create_task(session.post(path, body))
            for path, body in (
                (CHAT, chat),
                (CHAT, {**chat, "n": 2}),
                ("/v1/completions", {"prompt": MILLION[:500_000]}),
            )
        ]
        pause = await longest_pause(asyncio.create_task(asyncio.wait(asked)))
        took = time.monotonic() - begun
        assert [(await each)[0] for each in asked] == [200] * 3
        assert pause < took / 5, f"the event loop stood still for {pause:.2f} of {took:.2f} s"
        await session.end()
        assert session.conversation.turns == 4
        session.check_exact()


async def test_a_body_has_some_megabytes(tokenizer: Path, tmp_path: Path) -> None:
    """And is not compressed: what is inflated has no limit."""
    async with gateway_world(tokenizer, lambda _: "yes", tmp_path) as world:
        session = await world.session()
        status, answer = await session.post(CHAT, b" " * (9 << 20))
        assert (status, answer["error"]["type"]) == (413, "invalid_request_error")
        headers = {"x-api-key": session.key, "Content-Encoding": "gzip"}
        async with (
            aiohttp.ClientSession(headers=headers) as client,
            client.post(session.url + CHAT, data=gzip.compress(json.dumps(HELLO).encode())) as refused,
        ):
            assert refused.status == 415
            assert "gzip" in (await refused.json())["error"]["message"]
        assert (await session.post(CHAT, HELLO))[0] == 200


async def test_nothing_is_read_without_a_key(tokenizer: Path, tmp_path: Path) -> None:
    """The connection is closed with the refusal, while the rest of the body is still to come."""
    async with gateway_world(tokenizer, lambda _: "yes", tmp_path) as world:
        for more in (b"", b"Content-Encoding: gzip\r\n", b"Expect: 100-continue\r\n"):
            head = b"POST /x/v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n" + more + b"\r\n"
            reader, writer = await connect(world, head + gzip.compress(b" " * 100_000))
            async with asyncio.timeout(5):
                answer = await reader.read()
            assert b" 401 Unauthorized\r\n" in answer
            assert b"\r\nConnection: close\r\n" in answer
            writer.close()


async def test_who_sends_no_header_is_not_waited_for(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing, a part of one, or drops of one."""
    monkeypatch.setattr(gateway_module, "_HEADER_S", 1.0)
    async with gateway_world(tokenizer, lambda _: "yes", tmp_path) as world:
        silent, part, drops = [await connect(world, sent) for sent in (b"", b"GET / HTTP/1.1\r\nHost:", b"GET / ")]

        async def drip() -> None:
            while True:
                drops[1].write(b"x")
                await asyncio.sleep(0.2)

        dripping = asyncio.create_task(drip())
        async with asyncio.timeout(10):
            assert await silent[0].read() == b""
            assert await part[0].read() == b""
            with suppress(ConnectionError):  # a drop came after the end
                assert await drops[0].read() == b""
        dripping.cancel()
        for _, writer in (silent, part, drops):
            writer.close()


async def _turn(world: GatewayWorld, session: GatewayTest, held: tuple[Any, Any]) -> bytes:
    """Asks for a turn over a connection that stays open; returns the status line."""
    reader, writer = held
    path = session.url.removeprefix(world.gateway.url).encode()
    writer.write(b"GET %s/task HTTP/1.1\r\nHost: x\r\nx-api-key: %s\r\n\r\n" % (path, session.key.encode()))
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.split(b"\r\n") if line.startswith(b"Content-Length: "))
    await reader.readexactly(int(length.partition(b": ")[2]))
    return head.partition(b"\r\n")[0]


async def test_connections_without_a_key_push_out_each_other_alone(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_MAX_UNAUTHENTICATED", 8)
    async with gateway_world(tokenizer, lambda _: "yes", tmp_path) as world:
        session = await world.session()
        held = await connect(world)
        assert await _turn(world, session, held) == b"HTTP/1.1 200 OK"
        silent: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        for _ in range(40):
            silent.append(await connect(world))
            await asyncio.sleep(0.01)
        ended = [reader.at_eof() for reader, _ in silent]
        assert ended == [True] * 32 + [False] * 8, "the oldest ones are closed"
        assert await _turn(world, session, held) == b"HTTP/1.1 200 OK"
        assert (await session.post(CHAT, HELLO))[0] == 200
        for _, writer in silent:
            writer.close()


async def test_a_request_that_is_not_http_is_no_news(
    tokenizer: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    requests = (
        *(b"GET * HTTP/1.1\r\n\r\n", b"GET / HTTP/9\r\n\r\n", b"\x16\x03\x01garbage\r\n\r\n"),
        *(b"GET http://[:x/ HTTP/1.1\r\n\r\n", b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n"),
        b"GET / HTTP/1.1\r\nA: " + b"y" * 10_000 + b"\r\n\r\n",
    )
    async with gateway_world(tokenizer, lambda _: "yes", tmp_path) as world:
        for request in requests:
            reader, writer = await connect(world, request)
            async with asyncio.timeout(5):
                assert b" 400 Bad Request\r\n" in await reader.read()
            writer.close()
    assert caplog.records == []
    assert capfd.readouterr() == ("", "")


SERVER = """
import asyncio, os, resource, sys
from pathlib import Path
from tests.conversations.gateways import gateway_world

async def run(tokenizer, directory):
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    async with gateway_world(tokenizer, lambda _: "yes", directory) as world:
        session = await world.session()
        print(session.url, session.key, flush=True)
        loop, files = asyncio.get_running_loop(), []
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            if line == "use up\\n":
                try:
                    while True:
                        files.append(os.open("/dev/null", os.O_RDONLY))
                except OSError:
                    pass
            elif line == "free\\n":
                for file in files:
                    os.close(file)
            print("done", flush=True)

asyncio.run(run(*map(Path, sys.argv[1:])))
"""


@pytest.fixture
def few_files(tokenizer: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A gateway in a process that may have 256 files, and what it prints of errors."""
    errors = tmp_path / "errors"
    with errors.open("w") as file:
        server = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(tokenizer), str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
        )
    yield server, errors
    server.kill()
    server.communicate()


@pytest.mark.process
def test_no_number_of_connections_keeps_others_out(few_files: tuple[subprocess.Popen[str], Path]) -> None:
    """Nor does it fill the log, where no file is left for any."""
    server, errors = few_files
    assert server.stdin is not None
    assert server.stdout is not None
    url, key = server.stdout.readline().split()
    host, port = url.removeprefix("http://").partition("/")[0].split(":")

    async def answered(seconds: float) -> bool:
        timeout = aiohttp.ClientTimeout(seconds)
        async with aiohttp.ClientSession(headers={"x-api-key": key}, timeout=timeout) as client:
            try:
                async with client.post(url + CHAT, json=HELLO) as answer:
                    return answer.status == 200
            except TimeoutError:
                return False

    def tell(what: str) -> None:
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(f"{what}\n")
        server.stdin.flush()
        printed = iter(server.stdout.readline, "done\n")
        lines = list(printed)
        assert len(lines) <= 1, lines

    async def run() -> None:
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(350)]
        assert await answered(20), "350 connections that send nothing keep out one with a key"
        await asyncio.sleep(1.0)  # the server closes that connection
        tell("use up")
        assert not await answered(3), "no file is left"
        tell("free")
        assert await answered(20)
        for _, writer in silent:
            writer.close()

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert before[0] > 500
    asyncio.run(run())
    assert errors.stat().st_size < 2000
