"""A harness of OpenAI's client, and the example's: the row's number says which of the two holds a conversation.

OpenAI's takes three turns with a tool, of which the second is a stream; the reward is their number.
tests/conversations/test_gateway_clients.py has the other clients.
"""

from __future__ import annotations

import json
import os
from typing import Any

import httpx

TURNS = 3
TALKS = 3
"""Rows whose conversations are OpenAI's client's."""
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}


def talk() -> None:
    """Calls the tool as the model asks, and says to go on where it does not."""
    from openai import OpenAI

    tools: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
    messages: list[Any] = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 2?"}]
    asked: dict[str, Any] = {"model": os.environ["MEGARL_MODEL"], "messages": messages, "tools": tools}
    with OpenAI() as client:
        for turn in range(TURNS):
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
                values = json.loads(call.function.arguments)
                answer = str(values["a"] + values["b"])
                messages.append({"role": "tool", "tool_call_id": call.id, "content": answer})
            if not calls:
                messages.append({"role": "user", "content": "go on"})


def main() -> None:
    if json.loads(os.environ["MEGARL_TASK"])["fields"]["number"] >= TALKS:
        from examples.gateway import harness

        harness.main()
        return
    talk()
    key = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    reward = {"reward": TURNS, "done": True}
    httpx.post(f"{os.environ['MEGARL_SESSION_URL']}/reward", headers=key, json=reward).raise_for_status()


if __name__ == "__main__":
    main()
