"""The adapter of OpenEnv against a server of the real package."""

from __future__ import annotations

import asyncio
import selectors
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.environments.environment import Action, EnvironmentTask, Observation, ToolCall
from megarl.environments.openenv import OpenEnv
from tests.needs import lacking

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

PYTHON = Path(__file__).parents[2] / ".venv-openenv/bin/python"
START_LIMIT_S = 90
TASK = EnvironmentTask(prompt_id="p", messages=[{"role": "system", "content": "play"}], fields={"level": 3, "key": "k"})


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The address of a server with environments at /game and /tools."""
    if not PYTHON.exists():
        lacking("make openenv installs OpenEnv")
    command = [PYTHON, Path(__file__).with_name("openenv_server.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            with selectors.DefaultSelector() as ready:
                ready.register(server.stdout, selectors.EVENT_READ)
                assert ready.select(START_LIMIT_S), "the server has not started"
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
            server.stdin.close()
            assert server.wait(30) == 0
        finally:
            server.kill()


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
        OpenEnv(url=f"{url}/game/", action="move", observation="text", columns=["level"]), act("a"), act("win")
    )
    assert begun.messages == [{"role": "system", "content": "play"}, {"role": "user", "content": "level 3"}]
    assert [(turn.messages[0], turn.reward, turn.done) for turn in turns] == [
        ({"role": "user", "content": "a!"}, 0.0, False),
        ({"role": "user", "content": "win!"}, 1.0, True),
    ]


def test_without_a_field_the_whole_observation_is_shown_and_the_seed_has_32_bits(url: str) -> None:
    (begun,) = converse(OpenEnv(url=f"{url}/game", action="move"))
    assert begun.messages[-1] == {"role": "user", "content": '{"text": "level None", "seed": 5}'}


def test_tools_are_offered_and_called_until_the_environment_ends(url: str) -> None:
    environment = OpenEnv(url=f"{url}/tools")
    first = (
        ToolCall(name="add", arguments={"a": 1, "b": 2}, call_id="c1"),
        ToolCall(name="add", problem="no JSON"),
        ToolCall(name="sub"),
        ToolCall(name="add", arguments={"a": "one"}),
    )
    last = ToolCall(name="add", arguments={"a": 9}), ToolCall(name="add", arguments={"a": 1})
    _, turn, end = converse(environment, act("", *first), act("", *last))
    (tool,) = environment.tools
    function = tool["function"]
    assert (tool["type"], function["name"], function["description"]) == ("function", "add", "Adds.")
    assert function["parameters"]["required"] == ["a"]
    assert {name: kind["type"] for name, kind in function["parameters"]["properties"].items()} == {
        "a": "integer",
        "b": "integer",
    }
    *answers, mistake = turn.messages
    assert answers == [
        {"role": "tool", "name": "add", "content": "3", "tool_call_id": "c1"},
        {"role": "tool", "name": "add", "content": "no JSON"},
        {"role": "tool", "name": "sub", "content": "error: Unknown tool: 'sub'"},
    ]
    assert mistake["content"].startswith("error: ")
    assert "valid integer" in mistake["content"]
    assert (turn.reward, turn.done) == (0.25, False)
    assert (end.reward, end.done, len(end.messages)) == (0.25, True, 1)


def test_a_turn_without_a_call_ends_a_conversation_with_tools(url: str) -> None:
    assert converse(OpenEnv(url=f"{url}/tools"), act("It is 3."))[1] == Observation(messages=[], done=True)


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ({"action": "no_field"}, "answered step with VALIDATION_ERROR: Invalid message"),
        ({"action": "move", "observation": "board"}, "has no 'board'; it has: metadata, text, seed"),
        ({"action": "move", "columns": ["depth"]}, "^the row 'p' has no column 'depth': see columns"),
        ({"url": "localhost:1"}, "must begin with http"),
    ],
)
def test_what_does_not_fit_is_a_failure(url: str, args: dict[str, Any], problem: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=problem):
        converse(OpenEnv(**{"url": f"{url}/game", **args}), act("a"))
