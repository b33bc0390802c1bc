"""A gateway in the test's own event loop, a model whose answers are scripted, and what it was asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from megarl.config.schema import EnvironmentSettings
from megarl.conversations.chat import ChatRenderer
from megarl.conversations.chat_session import ChatSession, TurnLimits
from megarl.conversations.conversation import Conversation
from megarl.conversations.gateway.gateway import Gateway
from megarl.conversations.gateway.gateway_request import GatewayConfig, Sampling
from megarl.conversations.gateway.gateway_session import GatewaySession
from megarl.data.tokenizer import load_tokenizer
from megarl.environments.environment import EnvironmentTask
from megarl.types import Prompt, SampledTurn, SampleRequest, VersionSpan
from tests.data.rows import letter_tokenizer

TEMPLATE = """\
{% if tools %}<s>tools
{% for tool in tools %}{{ tool['function'] | tojson }}
{% endfor %}</s>
{% endif %}{% for m in messages %}<s>{{ m['role'] }}
{% if m['reasoning_content'] %}<think>
{{ m['reasoning_content'] }}
</think>

{% endif %}{{ m['content'] }}{% for call in m['tool_calls'] or [] %}
<tool_call>
{{ call['function'] | tojson }}
</tool_call>{% endfor %}</s>
{% endfor %}{% if add_generation_prompt %}<s>assistant
{% endif %}"""
"""Writes tools, thoughts and calls; it keeps all of what was written, so that chats only grow."""

LETTERS = "".join(map(chr, range(32, 127))) + "\n"


def gateway_tokenizer(directory: Path) -> Path:
    """Characters as tokens, with all of JSON's, and a chat template with tools."""
    return letter_tokenizer(directory, ["<s>", "</s>"], TEMPLATE, LETTERS, eos_token="</s>")


def call_text(name: str, **arguments: Any) -> str:
    """A call of a tool as the model writes it, with white space that no client sends back."""
    return f'<tool_call>\n{{"name":  "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


Scripted = Callable[[str], str | Awaitable[str]]
"""Returns the model's answer to a prompt, which is decoded."""


class GatewayWorld:
    """A gateway, its model and its conversations.

    Attributes:
        record: what was sampled, by sample id: the prompt's ids, and the answer's.
    """

    def __init__(self, tokenizer: Path, answer: Scripted, directory: Path, limits: TurnLimits, **args: Any) -> None:
        self.tokenizer = load_tokenizer(tokenizer)
        self.record: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self.file = directory / "gateway.json"
        self._answer, self._limits = answer, limits
        place = GatewayConfig(file=str(self.file), sampling=Sampling(), rewarded=args.pop("rewarded", True))
        limit_s = args.pop("time_limit", 60.0)
        settings = EnvironmentSettings(name="gateway", time_limit=limit_s, args={"command": None, **args})
        self.gateway = Gateway(settings, place, self.tokenizer)

    async def sample(self, request: SampleRequest) -> SampledTurn:
        assert request.sample_id not in self.record, "a turn is sampled once"
        text = self._answer(self.tokenizer.decode(request.prompt.token_ids, special=True))
        text = text if isinstance(text, str) else await text
        ids = self.tokenizer.respond(text)
        assert request.max_new_tokens is not None
        assert request.temperature is None, "that of the run"
        kept = tuple(ids[: request.max_new_tokens])
        self.record[request.sample_id] = (request.prompt.token_ids, kept)
        return SampledTurn(
            token_ids=kept,
            logprobs=-np.arange(1, len(kept) + 1, dtype=np.float32) / 64,
            finished=len(kept) == len(ids),
            versions=(VersionSpan(start=0, stop=len(kept), version=0, engine_id=0),),
        )

    def chat(self, name: str) -> ChatSession:
        prompt = Prompt(prompt_id=name, token_ids=())
        conversation = Conversation(request=SampleRequest(sample_id=name, prompt=prompt, seed=7))
        renderer = ChatRenderer(self.tokenizer, {}, history="sampled", context=self._limits.context)
        return ChatSession(conversation, renderer, self.sample, self._limits)

    def converse(self, name: str = "a", **fields: Any) -> tuple[Conversation, asyncio.Task[None]]:
        """Begins a conversation."""
        chat, task = self.chat(name), EnvironmentTask(prompt_id=name, fields=fields)
        return chat.conversation, asyncio.create_task(self.gateway.converse(chat, task))

    async def session(self, name: str = "a", **fields: Any) -> GatewayTest:
        """Begins a conversation, and takes its task as a harness elsewhere does."""
        conversation, running = self.converse(name, **fields)
        await asyncio.sleep(0)
        access = json.loads(self.file.read_text())
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {access['key']}"}) as client:
            taken = await (await client.post(f"{access['url']}/tasks/next")).json()
        return GatewayTest(self, conversation, running, taken["session_url"], taken["key"], taken["task"])


@dataclass
class GatewayTest:
    """A session of a test."""

    world: GatewayWorld
    conversation: Conversation
    running: asyncio.Task[None]
    url: str
    key: str
    task: dict[str, Any]

    async def post(self, path: str, body: Any, key: str | None = None) -> tuple[int, Any]:
        """Returns the status and the answer to a request; the body is JSON, or bytes as they are."""
        headers = {"Authorization": f"Bearer {self.key if key is None else key}"}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with aiohttp.ClientSession(headers=headers) as client, client.post(self.url + path, data=data) as answer:
            return answer.status, await answer.json()

    async def end(self, reward: float = 1.0) -> None:
        """Posts the reward, and waits for the end."""
        assert (await self.post("/reward", {"reward": reward, "done": True}))[0] == 200
        await self.running

    def check_exact(self) -> None:
        """Asserts that the branches have exactly what was read and sampled, and in order."""
        name = self.conversation.request.sample_id
        turns = self.world.record.items()
        sampled = sorted(turn for sample_id, turn in turns if sample_id.startswith(f"{name}/"))
        found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        for branch in self.conversation.branches:
            start = 0
            for own, run in groupby(branch.loss_mask):
                end = start + len(list(run))
                if own:
                    read = (*branch.prompt, *branch.response[:start])
                    found.append((read, tuple(branch.response[start:end])))
                start = end
            assert len(branch.logprobs) == sum(branch.loss_mask)
        assert sorted(found) == sampled
        assert len(found) == self.conversation.turns


def gateway_session(world: GatewayWorld, name: str = "a") -> GatewaySession:
    """Begins a session that no server has."""
    return GatewaySession(world.chat(name), EnvironmentTask(prompt_id=name), 60.0)


@asynccontextmanager
async def gateway_world(
    tokenizer: Path, answer: Scripted, directory: Path, limits: TurnLimits | None = None, **args: Any
) -> AsyncIterator[GatewayWorld]:
    """Serves a gateway on loopback."""
    world = GatewayWorld(tokenizer, answer, directory, limits or TurnLimits(context=4096, turn=512, turns=16), **args)
    await world.gateway.start("127.0.0.1")
    try:
        yield world
    finally:
        await world.gateway.close()
