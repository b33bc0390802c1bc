"""Tools: their schemas, their calls, and the built-in ones."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Literal

import pytest

from megarl.environments import tool_functions
from megarl.environments.environment import Action, EnvironmentTask, Observation, ToolCall
from megarl.environments.tool_environment import Tool, ToolEnvironment
from megarl.environments.tool_functions import calculator, python


def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C") -> dict[str, Any]:
    """Tells the weather of some days.

    Args:
        city: name of the city,
            as people there write it
        days: how many: at least 1
        unit: of the temperature

    Returns:
        A number per day.
    """
    return {"city": city, "temperatures": [20] * days, "unit": unit}


async def broken(reason: str) -> str:
    """Fails."""
    raise RuntimeError(reason)


class Shop(ToolEnvironment):
    """A shop, whose public methods are tools."""

    def reset(self, task: EnvironmentTask, seed: int) -> Any:
        self._stock = dict(task.fields["stock"])
        return task.messages

    async def buy(self, item: str, count: int) -> int:
        """Buys some of an item, and returns how many are left."""
        self._stock[item] -= count
        return self._stock[item]

    def score(self, answer: Action) -> float:
        return float(answer.content == str(sum(self._stock.values())))


def action(*calls: ToolCall, content: str = "", finished: bool = True) -> Action:
    return Action(text=content, content=content, token_ids=(), finished=finished, tool_calls=calls)


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments, call_id=f"call of {name}")


def step(environment: ToolEnvironment, taken: Action) -> Observation:
    return asyncio.run(environment.step(taken))


def answers(observation: Observation) -> list[str]:
    assert not isinstance(observation.messages, str)
    assert all(message["role"] == "tool" for message in observation.messages)
    return [message["content"] for message in observation.messages]


def test_schemas_are_those_of_transformers() -> None:
    from transformers.utils import get_json_schema

    ours: Mapping[str, Any] = Tool("weather", weather).schema["function"]
    theirs: Mapping[str, Any] = get_json_schema(weather)["function"]
    assert (ours["name"], ours["description"]) == (theirs["name"], theirs["description"])
    assert ours["parameters"]["required"] == theirs["parameters"]["required"]
    for name, described in theirs["parameters"]["properties"].items():
        mine = dict(ours["parameters"]["properties"][name])
        assert " ".join(described.pop("description").split()) == mine.pop("description")
        assert described.items() <= mine.items()


def test_calls_are_answered_and_what_is_wrong_with_them_is_told() -> None:
    environment = ToolEnvironment(["tests.environments.test_tools:weather", "tests.environments.test_tools:broken"])
    assert [tool["function"]["name"] for tool in environment.tools] == ["weather", "broken"]
    calls = [
        call("weather", city="Bonn", days="2"),
        call("weather", city="Bonn", days="two", wind=1),
        call("broken", reason="no luck"),
        call("clock"),
        ToolCall(name="", problem="not a call"),
    ]
    observation = step(environment, action(*calls))
    told = answers(observation)
    assert json.loads(told[0]) == {"city": "Bonn", "temperatures": [20, 20], "unit": "C"}
    assert told[1].startswith("error: arguments of weather: days: ")
    assert "wind: " in told[1]
    assert told[2:] == [
        "error: RuntimeError: no luck",
        "error: ValueError: there is no tool 'clock'; there are weather, broken",
        "error: ValueError: not a call",
    ]
    assert not isinstance(observation.messages, str)
    assert [m["tool_call_id"] for m in observation.messages[:2]] == ["call of weather"] * 2
    assert not observation.done
    assert observation.metrics == {"tool_calls": 5, "failed_tool_calls": 4}


def test_a_subclass_has_its_methods_as_tools_and_scores_the_answer() -> None:
    shop = Shop(["calculator"])
    assert [tool["function"]["name"] for tool in shop.tools] == ["buy", "calculator"]
    shop.reset(EnvironmentTask(prompt_id="0", fields={"stock": {"apple": 5, "pear": 4}}), 0)
    observation = step(shop, action(call("buy", item="apple", count=2), call("calculator", expression="3 + 4")))
    assert answers(observation) == ["3", "7"]
    ended = step(shop, action(content="7"))
    assert (ended.done, ended.reward, ended.metrics["tool_calls"]) == (True, 1, 2)
    cut = step(shop, action(call("buy", item="apple", count=2), finished=False))
    assert (cut.truncated, cut.done, cut.metrics["tool_calls"]) == (True, False, 2)


@pytest.mark.parametrize(
    ("expression", "value"),
    [("2 + 3 * 4", "14"), ("-2 ** 2", "-4"), ("(1 + 2) / 4", "0.75"), ("7 // 2 + 7 % 2", "4"), ("sqrt(16)", "4.0")],
)
def test_the_calculator_computes(expression: str, value: str) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["9 ** 9 ** 9", "__import__('os')", "(1).real", "[1][0]", "(lambda: 1)()", "x", "'a' * 9", "1 +", "(" * 999],
)
def test_the_calculator_refuses_what_is_not_arithmetic(expression: str) -> None:
    with pytest.raises((ValueError, SyntaxError, MemoryError)):
        calculator(expression)


@pytest.mark.process
def test_python_runs_with_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "hidden")
    found = "import os; open('x', 'w').write('y'); print(os.listdir('.'), 'SECRET_KEY' in os.environ)"
    assert python(found) == "['x'] False"
    shown = python("print('a' * 10000)")
    assert len(shown) < 4100
    assert "6000 characters" in shown
    for program, reason in {
        "1 / 0": "ZeroDivisionError",
        "'a' * 10 ** 10": "MemoryError",
        "open('x', 'w').write('y' * 2 ** 25)": "File too large",
        "import sys; sys.exit(3)": "exit status 3",
    }.items():
        with pytest.raises(RuntimeError, match=reason):
            python(program)
    monkeypatch.setattr(tool_functions, "_SECONDS", 1)
    with pytest.raises(RuntimeError, match="took longer than 1 s"):
        python("import time; time.sleep(60)")
