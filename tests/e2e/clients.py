"""A harness that holds its conversation by one of several clients: the row's number says by which.

Each takes turns with a tool until the model answers without a call, three at most; every second one is a stream. The
reward is the number of turns.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

TURNS = 3
MODEL = os.environ.get("MEGARL_MODEL", "")
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
QUESTION: dict[str, Any] = {"role": "user", "content": "1 + 2?"}
AGAIN: dict[str, Any] = {"role": "user", "content": "go on"}


def added(arguments: Any) -> str:
    values = json.loads(arguments) if isinstance(arguments, str) else arguments
    return str(values["a"] + values["b"])


def chat() -> int:
    """OpenAI's Chat Completions."""
    from openai import OpenAI

    tools: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
    messages: list[Any] = [{"role": "system", "content": "Add."}, QUESTION]
    with OpenAI() as client:
        for turn in range(TURNS):
            asked: dict[str, Any] = {"model": MODEL, "messages": messages, "tools": tools}
            if turn % 2:
                with client.chat.completions.stream(**asked) as events:
                    for _ in events:
                        pass
                    message = events.get_final_completion().choices[0].message
            else:
                message = client.chat.completions.create(**asked).choices[0].message
            messages.append(message)
            calls: list[Any] = message.tool_calls or []
            for call in calls:
                answer = {"role": "tool", "tool_call_id": call.id, "content": added(call.function.arguments)}
                messages.append(answer)
            messages += [] if calls else [AGAIN]
    return TURNS


def responses() -> int:
    """OpenAI's Responses."""
    from openai import OpenAI

    tools: list[Any] = [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}]
    items: list[Any] = [QUESTION]
    with OpenAI() as client:
        for turn in range(TURNS):
            asked: dict[str, Any] = {"model": MODEL, "instructions": "Add.", "input": items, "tools": tools}
            if turn % 2:
                with client.responses.stream(**asked) as events:
                    for _ in events:
                        pass
                    output = events.get_final_response().output
            else:
                output = client.responses.create(**asked).output
            items += output
            calls = [item for item in output if item.type == "function_call"]
            for call in calls:
                answer = {"type": "function_call_output", "call_id": call.call_id, "output": added(call.arguments)}
                items.append(answer)
            items += [] if calls else [AGAIN]
    return TURNS


def messages() -> int:
    """Anthropic's Messages."""
    from anthropic import Anthropic

    tools: list[Any] = [{"name": "add", "input_schema": SCHEMA}]
    chat: list[Any] = [QUESTION]
    with Anthropic() as client:
        for turn in range(TURNS):
            asked: dict[str, Any] = {"model": MODEL, "max_tokens": 64, "system": "Add.", "tools": tools}
            if turn % 2:
                with client.messages.stream(messages=chat, **asked) as events:
                    answer = events.get_final_message()
            else:
                answer = client.messages.create(messages=chat, **asked)
            chat.append({"role": "assistant", "content": answer.content})
            calls = [block for block in answer.content if block.type == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": added(call.input)} for call in calls]
            chat.append({"role": "user", "content": results} if results else AGAIN)
    return TURNS


def framework() -> int:
    """OpenAI's agents, which know nothing but the address and the key."""
    (packages,) = (Path(__file__).parents[2] / ".venv-agents/lib").glob("python3*/site-packages")
    sys.path.append(str(packages))
    import agents  # pyright: ignore[reportMissingImports]

    @agents.function_tool
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    agents.set_tracing_disabled(True)
    agent = agents.Agent(name="adder", instructions="Add.", model=MODEL, tools=[add])

    async def run() -> int:
        turns, question, streams = 0, "1 + 2?", False
        while turns < TURNS:
            try:
                if streams:
                    result = agents.Runner.run_streamed(agent, question, max_turns=TURNS - turns)
                    async for _ in result.stream_events():
                        pass
                else:
                    result = await agents.Runner.run(agent, question, max_turns=TURNS - turns)
            except agents.exceptions.MaxTurnsExceeded:
                return TURNS
            turns += len(result.raw_responses)
            question, streams = [*result.to_input_list(), AGAIN], not streams
        return turns

    return asyncio.run(run())


CLIENTS: tuple[Callable[[], int], ...] = (chat, responses, messages, framework)


def main() -> None:
    number = json.loads(os.environ["MEGARL_TASK"])["fields"]["number"]
    if number == len(CLIENTS):
        from examples.gateway import harness

        harness.main()
        return
    reward = {"reward": CLIENTS[number](), "done": True}
    key = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    httpx.post(f"{os.environ['MEGARL_SESSION_URL']}/reward", headers=key, json=reward).raise_for_status()


if __name__ == "__main__":
    main()
