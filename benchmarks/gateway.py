"""The gateway's cost: 64 sessions of 20 turns at once, with a model that answers at once and clients in this process.

    python -m benchmarks.gateway [--sessions 64] [--turns 20]

Prints milliseconds per turn, of the clients too, all in one thread, by the turns that a session has had; and those that
reading a turn and rendering what follows takes, by family of the chat template.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from megarl.conversations.chat import ChatRenderer
from megarl.conversations.chat_session import TurnLimits
from megarl.types import SampledTurn, SampleRequest, VersionSpan
from tests.conversations.families import FAMILIES, end_ids, tokenizer
from tests.conversations.gateways import GatewayTest, GatewayWorld, gateway_tokenizer, gateway_world

QUESTION = "a question of some words; " * 8
ANSWER = "an answer of some words. " * 8


async def _turn(session: GatewayTest, client: aiohttp.ClientSession, messages: list[Any]) -> float:
    """Takes a turn; returns the length of the request."""
    messages.append({"role": "user", "content": QUESTION})
    body = json.dumps({"messages": messages}).encode()
    headers = {"Authorization": f"Bearer {session.key}"}
    async with client.post(f"{session.url}/v1/chat/completions", data=body, headers=headers) as answer:
        messages.append((await answer.json())["choices"][0]["message"])
    return len(body)


def _engine(world: GatewayWorld) -> Any:
    """Returns what samples turns at once."""
    ids = tuple(world.tokenizer.respond(ANSWER))
    versions = (VersionSpan(start=0, stop=len(ids), version=0, engine_id=0),)
    logprobs = np.zeros(len(ids), dtype=np.float32)

    async def sample(request: SampleRequest) -> SampledTurn:
        return SampledTurn(token_ids=ids, logprobs=logprobs, finished=True, versions=versions)

    return sample


async def _measure(directory: Path, count: int, turns: int) -> None:
    """Prints what turns of so many sessions at once cost."""
    limits = TurnLimits(context=1 << 20, turn=4096, turns=turns)
    tokenizer = gateway_tokenizer(directory / "tokenizer")
    async with gateway_world(tokenizer, lambda _: "", directory, limits) as world:
        world.sample = _engine(world)
        sessions = [await world.session(str(index)) for index in range(count)]
        chats: list[list[Any]] = [[] for _ in sessions]
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
            for turn in range(1, turns + 1):
                start, cpu = time.perf_counter(), time.process_time()
                sent = await asyncio.gather(*(_turn(s, client, chat) for s, chat in zip(sessions, chats, strict=True)))
                spent = (time.perf_counter() - start) / count * 1e3
                used = (time.process_time() - cpu) / count * 1e3
                if turn in (1, 2, 4, 8, 12, 16, 20):
                    print(
                        f"turn {turn:2}: {spent:.2f} ms per turn, {used:.2f} of them on the CPU, {sent[0] / 1e3:.1f} kB"
                    )
        for session in sessions:
            await session.end()
            assert [len(branch.turns) for branch in session.conversation.branches] == [turns]


def _render(name: str, turns: int) -> None:
    """Prints what turns of a long conversation cost, each the best of the five before it."""
    renderer = ChatRenderer(tokenizer(name), {}, ends=end_ids(name))
    sampled = [*tokenizer(name).continuation(FAMILIES[name].said(ANSWER.strip())), end_ids(name)[0]]
    question, spent = {"role": "user", "content": QUESTION}, list[float]()
    chat: list[Any] = [question]
    for _ in range(turns):
        start = time.process_time()
        action = renderer.read(sampled, True, prompt=(), tools=())
        assert renderer.follow(chat, action, [question], prompt=(), tools=()) is not None
        spent.append((time.process_time() - start) * 1e3)
        chat += [action.message, question]
    shown = (5, turns // 4, turns)
    print(f"{name:10} " + ", ".join(f"turn {turn}: {min(spent[turn - 5 : turn]):.2f} ms" for turn in shown))


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--turns", type=int, default=20)
    options = parser.parse_args(arguments)
    for family in ("qwen2.5", "qwen3-2507", "qwen3", "glm4.5", "llama3"):
        _render(family, 4 * options.turns)
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(_measure(Path(directory), options.sessions, options.turns))


if __name__ == "__main__":
    main(sys.argv[1:])
