"""What the gateway does to whom: other users without a key, who send much or nothing; harnesses that send much."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from megarl.conversations.chat_session import TurnLimits
from megarl.conversations.gateway import gateway as gateway_module
from tests.conversations.gateways import GatewayWorld, gateway_world
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
        chat = {"messages": [{"role": "user", "content": MILLION * 2}]}
        begun = time.monotonic()
        asked = [
            asyncio.create_task(session.post(path, body))
            for path, body in (
                (CHAT, chat),
                (CHAT, {**chat, "n": 2}),
                ("/v1/completions", {"prompt": MILLION}),
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
    monkeypatch.setattr(gateway_module, "_HEADER_S", 1.0, raising=False)
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
