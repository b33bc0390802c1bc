"""The clients of OpenAI and Anthropic, and an agent framework, against a gateway: unchanged, also with streams.

The clients' packages take seconds to import, so that the tests do it, which `make unit` leaves out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.conversations.gateways import GatewayTest, call_text, gateway_world
from tests.needs import lacking

if TYPE_CHECKING:
    import openai

pytestmark = pytest.mark.process  # OpenAI's client asks uname for the machine

ROOT = Path(__file__).parents[2]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
THOUGHTS = "<think>\nlet me add\n</think>\n\n"
CALLS = THOUGHTS + "I ask." + call_text("add", a=2, b=3) + call_text("add", a=4, b=5)
ANSWERS = (CALLS, THOUGHTS + call_text("add", a=5, b=9), "14, by {tools}")
"""Of a model that adds four numbers in three turns."""


def added(arguments: Any) -> str:
    values = json.loads(arguments) if isinstance(arguments, str) else arguments
    return str(values["a"] + values["b"])


def check(session: GatewayTest, answers: Sequence[str] = ANSWERS) -> None:
    """Asserts that the turns of a session are one branch, as they were sampled, with what the tools answered."""
    (branch,) = session.conversation.branches
    assert len(branch.turns) == len(answers)
    text = session.world.tokenizer.decode(branch.ids, special=True)
    for answer in answers:
        assert f"<s>assistant\n{answer}</s>" in text
    assert text.index("<s>tool\n5</s>") < text.index("<s>tool\n9</s>") < text.index("<s>tool\n14</s>")
    assert '"name": "add"' in text[: text.index("<s>user")]
    assert session.conversation.reward == 1.0


def calls_differ(calls: Sequence[str]) -> None:
    assert len(calls) == len(set(calls)) == 3


@asynccontextmanager
async def talking(
    tokenizer: Path, directory: Path, answers: Sequence[str] = ANSWERS
) -> AsyncIterator[tuple[GatewayTest, openai.AsyncOpenAI]]:
    """A session with its client, which has ended and is exact afterwards."""
    import openai

    said = iter(answers)
    async with gateway_world(tokenizer, lambda _: next(said), directory) as world:
        session = await world.session()
        async with openai.AsyncOpenAI(base_url=f"{session.url}/v1", api_key=session.key) as client:
            yield session, client
        await session.end()
    session.check_exact()
    if answers is ANSWERS:
        check(session)


async def _chat_turn(client: openai.AsyncOpenAI, stream: bool, **asked: Any) -> dict[str, Any]:
    if not stream:
        answer = await client.chat.completions.create(**asked)
        assert answer.usage is not None
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        return answer.choices[0].message.model_dump()
    async with client.chat.completions.stream(**asked) as events:
        async for _ in events:
            pass
        (choice,) = (await events.get_final_completion()).choices
    assert choice.finish_reason == ("tool_calls" if choice.message.tool_calls else "stop")
    return choice.message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True)


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_chat(tokenizer: Path, tmp_path: Path, stream: bool) -> None:
    async with talking(tokenizer, tmp_path) as (_, client):
        assert [model.id async for model in client.models.list()] == ["policy"]
        tools = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA, "strict": True}}]
        messages: list[Any] = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+3+4+5?"}]
        calls: list[str] = []
        while True:
            message = await _chat_turn(client, stream, model="policy", messages=messages, tools=tools)
            messages.append(message)
            for call in message.get("tool_calls") or ():
                calls.append(call["id"])
                answer = added(call["function"]["arguments"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": answer})
            if not message.get("tool_calls"):
                break
        assert message["content"] == ANSWERS[-1]
        calls_differ(calls)


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_responses(tokenizer: Path, tmp_path: Path, stream: bool) -> None:
    import openai

    async with talking(tokenizer, tmp_path) as (_, client):
        asked: dict[str, Any] = {
            "model": "policy",
            "instructions": "Add.",
            "tools": [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}],
        }
        items: list[Any] = [{"role": "user", "content": "2+3+4+5?"}]
        calls: list[str] = []
        while True:
            if stream:
                async with client.responses.stream(input=items, **asked) as events:
                    async for _ in events:
                        pass
                    response: Any = await events.get_final_response()
            else:
                response = await client.responses.create(input=items, **asked)
            items += [item.model_dump(exclude_none=True) for item in response.output]
            called = [item for item in response.output if item.type == "function_call"]
            for call in called:
                calls.append(call.call_id)
                answer = {"type": "function_call_output", "call_id": call.call_id}
                items.append({**answer, "output": added(call.arguments)})
            if not called:
                break
        assert response.output_text == ANSWERS[-1]
        calls_differ(calls)
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await client.responses.create(input="go on", previous_response_id=response.id, **asked)


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropic_messages(tokenizer: Path, tmp_path: Path, stream: bool) -> None:
    import anthropic

    async with (
        talking(tokenizer, tmp_path) as (session, _),
        anthropic.AsyncAnthropic(base_url=session.url, api_key=session.key) as client,
    ):
        assert [model.id async for model in client.models.list()] == ["policy"]
        tools: list[Any] = [{"name": "add", "input_schema": SCHEMA}]
        asked: dict[str, Any] = {"model": "policy", "max_tokens": 4096, "system": "Add.", "tools": tools}
        messages: list[Any] = [{"role": "user", "content": "2+3+4+5?"}]
        calls: list[str] = []
        while True:
            if stream:
                async with client.messages.stream(messages=messages, **asked) as events:
                    answer = await events.get_final_message()
            else:
                answer = await client.messages.create(messages=messages, **asked)
            messages.append({"role": "assistant", "content": answer.content})
            called = [block for block in answer.content if block.type == "tool_use"]
            assert answer.stop_reason == ("tool_use" if called else "end_turn")
            if not called:
                break
            calls += [block.id for block in called]
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": added(block.input)} for block in called
            ]
            messages.append({"role": "user", "content": results})
        calls_differ(calls)
        with pytest.raises(anthropic.BadRequestError, match="stop_sequences"):
            await client.messages.create(messages=messages[:1], stop_sequences=["x"], **asked)
        other = anthropic.AsyncAnthropic(base_url=session.url, api_key="wrong")
        with pytest.raises(anthropic.AuthenticationError):
            await other.messages.create(messages=messages[:1], **asked)
        await other.close()


async def test_openai_completions_of_token_ids(tokenizer: Path, tmp_path: Path) -> None:
    """What is asked for in token ids continues the branch whose ids it begins with; log-probabilities are exact."""
    async with talking(tokenizer, tmp_path, ["one", "two", "three"]) as (session, client):
        ids = session.world.tokenizer.encode("count: ")
        extra = {"return_token_ids": True}
        asked: dict[str, Any] = {"model": "policy", "logprobs": 0, "extra_body": extra}
        for text in ("one", "two"):
            whole: Any = await client.completions.create(prompt=ids, **asked)
            (choice,) = whole.choices
            assert choice.text == text
            assert choice.logprobs.tokens == [*text, "</s>"]
            assert choice.logprobs.token_logprobs == [-number / 64 for number in range(1, len(text) + 2)]
            assert choice.prompt_token_ids == ids
            ids = [*ids, *choice.token_ids, *session.world.tokenizer.continuation(" and ")]
        text = [
            part.choices[0].text
            async for part in await client.completions.create(model="policy", prompt="count: one", stream=True)
        ]
        assert text == ["three"]
        assert [len(branch.turns) for branch in session.conversation.branches] == [2, 1]


async def test_several_answers_are_branches(tokenizer: Path, tmp_path: Path) -> None:
    async with talking(tokenizer, tmp_path, ["a", "b", "c", "d"]) as (session, client):
        messages: list[Any] = [{"role": "user", "content": "a letter?"}]
        answer = await client.chat.completions.create(model="policy", messages=messages, n=3, logprobs=True)
        assert [choice.message.content for choice in answer.choices] == ["a", "b", "c"]
        for choice in answer.choices:
            assert choice.logprobs is not None
            tokens = [(token.token, token.logprob) for token in choice.logprobs.content or ()]
            assert tokens == [(choice.message.content, -1 / 64), ("</s>", -2 / 64)]
        messages += [answer.choices[1].message, {"role": "user", "content": "another?"}]
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                model="policy", messages=messages, stream=True, stream_options={"include_usage": True}
            )
        ]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "d"
        assert chunks[-1].usage is not None
        assert [len(branch.turns) for branch in session.conversation.branches] == [1, 1, 2]


@pytest.mark.parametrize("protocol", ["responses", "chat"])
async def test_openai_agents(tokenizer: Path, tmp_path: Path, protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The framework, which knows only the base URL and the key."""
    packages = list((ROOT / ".venv-agents/lib").glob("python3*/site-packages"))
    if not packages:
        lacking("make agents installs openai-agents")
    monkeypatch.syspath_prepend(str(packages[0]))
    sys.modules.pop("agents", None)
    import agents  # pyright: ignore[reportMissingImports]

    @agents.function_tool
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    async with talking(tokenizer, tmp_path) as (_, client):
        kinds = {"responses": agents.OpenAIResponsesModel, "chat": agents.OpenAIChatCompletionsModel}
        model = kinds[protocol](model="policy", openai_client=client)
        agents.set_tracing_disabled(True)
        agent = agents.Agent(name="adder", instructions="Add.", model=model, tools=[add])
        result = await agents.Runner.run(agent, "2+3+4+5?")
        assert result.final_output == ANSWERS[-1]
