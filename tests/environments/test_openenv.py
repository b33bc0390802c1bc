"""The adapter of OpenEnv against a server with the frames of OpenEnv 0.10's own."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection, serve

from megarl.environments.environment import Action, EnvironmentTask, Observation, ToolCall
from megarl.environments.openenv import OpenEnv

TASK = EnvironmentTask(prompt_id="p", messages=[{"role": "system", "content": "play"}], fields={"level": 3, "key": "k"})
ADD = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {}}}


def frame(reward: float | None = None, done: bool = False, **observation: Any) -> dict[str, Any]:
    data = {"observation": {**observation, "metadata": {}}, "reward": reward, "done": done}
    return {"type": "observation", "data": data}


def answer(message: dict[str, Any]) -> dict[str, Any]:
    """What a game and a server of tools say to a message."""
    data = message["data"]
    if message["type"] == "reset":
        return frame(text=f"level {data.get('level')}", seed=data["seed"])
    if data.get("type") == "list_tools":
        return frame(tools=[ADD])
    if data.get("type") == "call_tool" and data["tool_name"] == "add":
        total = str(sum(data["arguments"].values()))
        result = {"content": [{"type": "text", "text": total}], "is_error": False}
        return frame(reward=0.25, done=total == "9", tool_name="add", result=result, error=None)
    if data.get("type") == "call_tool":
        error = {"error_type": "tool_not_found", "message": "Unknown tool"}
        return frame(tool_name=data["tool_name"], result=None, error=error)
    if "move" in data:
        return frame(reward=1 if data["move"] == "win" else None, done=data["move"] == "win", text=data["move"] + "!")
    return {"type": "error", "data": {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": []}}


@pytest.fixture
def url() -> Iterator[str]:
    def session(socket: ServerConnection) -> None:
        assert socket.request is not None
        assert socket.request.path == "/games/ws"
        try:
            for raw in socket:
                socket.send(json.dumps(answer(json.loads(raw))))
        except ConnectionClosed:
            pass

    with serve(session, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}/games/"
        server.shutdown()


def act(content: str, *calls: ToolCall) -> Action:
    return Action(text=content, content=content, token_ids=(1,), finished=True, tool_calls=calls)


def converse(environment: OpenEnv, *actions: Action) -> list[Observation]:
    """What an environment answers to its reset and to actions."""

    async def run() -> list[Observation]:
        try:
            return [await environment.reset(TASK, 2**40 + 5), *[await environment.step(action) for action in actions]]
        finally:
            await environment.close()

    return asyncio.run(run())


def test_a_game_gets_texts_and_gives_texts_and_rewards(url: str) -> None:
    begun, *turns = converse(
        OpenEnv(url=url, action="move", observation="text", columns=["level"]), act("a"), act("win")
    )
    assert begun.messages == [{"role": "system", "content": "play"}, {"role": "user", "content": "level 3"}]
    assert [(turn.messages[0], turn.reward, turn.done) for turn in turns] == [
        ({"role": "user", "content": "a!"}, 0.0, False),
        ({"role": "user", "content": "win!"}, 1.0, True),
    ]


def test_without_a_field_the_whole_observation_is_shown_and_the_seed_has_32_bits(url: str) -> None:
    (begun,) = converse(OpenEnv(url=url, action="move"))
    assert begun.messages[-1] == {"role": "user", "content": '{"text": "level None", "seed": 5}'}


def test_tools_are_offered_and_called_until_the_environment_ends(url: str) -> None:
    environment = OpenEnv(url=url, observation="text")
    first = (
        ToolCall(name="add", arguments={"a": 1, "b": 2}, call_id="c1"),
        ToolCall(name="add", problem="no JSON"),
        ToolCall(name="sub"),
    )
    last = ToolCall(name="add", arguments={"a": 9}), ToolCall(name="add", arguments={"a": 1})
    _, turn, end = converse(environment, act("", *first), act("", *last))
    assert environment.tools == [
        {
            "type": "function",
            "function": {"name": "add", "description": "Adds.", "parameters": ADD["input_schema"]},
        }
    ]
    assert turn == Observation(
        messages=[
            {"role": "tool", "name": "add", "content": "3", "tool_call_id": "c1"},
            {"role": "tool", "name": "add", "content": "no JSON"},
            {"role": "tool", "name": "sub", "content": "error: Unknown tool"},
        ],
        reward=0.25,
    )
    assert (end.reward, end.done, len(end.messages)) == (0.25, True, 1)


def test_a_turn_without_a_call_ends_a_conversation_with_tools(url: str) -> None:
    assert converse(OpenEnv(url=url), act("It is 3."))[1] == Observation(messages=[], done=True)


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ({"action": "no_field"}, "answered step with VALIDATION_ERROR: Invalid message"),
        ({"action": "move", "observation": "board"}, "has no 'board'; it has: text, seed"),
        ({"columns": ["depth"]}, "no column 'depth'"),
        ({"url": "localhost:1"}, "must begin with http"),
    ],
)
def test_what_does_not_fit_is_a_failure(url: str, args: dict[str, Any], problem: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=problem):
        converse(OpenEnv(**{"url": url, **args}), act("a"))
