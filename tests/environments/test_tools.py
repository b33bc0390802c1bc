"""Tools: their schemas, their calls, and the built-in ones."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest

from megarl.environments import python_program, tool_functions
from megarl.environments.environment import Action, EnvironmentTask, Observation, ToolCall
from megarl.environments.tool_environment import Tool, ToolEnvironment
from megarl.environments.tool_functions import calculator, python
from tests.leftovers import comes_true
from tests.rewards.test_process import alive


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


async def exits(status: int) -> str:
    """Ends the program."""
    sys.exit(status)


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
    names = ["weather", "broken", "exits"]
    environment = ToolEnvironment([f"tests.environments.test_tools:{name}" for name in names])
    assert [tool["function"]["name"] for tool in environment.tools] == names
    calls = [
        call("weather", city="Bonn", days="2"),
        call("weather", city="Bonn", days="two", wind=1),
        call("broken", reason="no luck"),
        call("exits", status=3),
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
        "error: SystemExit: 3",
        "error: ValueError: there is no tool 'clock'; there are weather, broken, exits",
        "error: ValueError: not a call",
    ]
    assert not isinstance(observation.messages, str)
    assert [m["tool_call_id"] for m in observation.messages[:2]] == ["call of weather"] * 2
    assert not observation.done
    assert observation.metrics == {"tool_calls": 6, "failed_tool_calls": 5}


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
    [
        ("2 + 3 * 4", "14"),
        ("-2 ** 2", "-4"),
        ("(1 + 2) / 4", "0.75"),
        ("7 // 2 + 7 % 2", "4"),
        ("sqrt(16)", "4.0"),
        ("round(25, -1)", "20"),
    ],
)
def test_the_calculator_computes(expression: str, value: str) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "9 ** 9 ** 9",
        "__import__('os')",
        "(1).real",
        "[1][0]",
        "(lambda: 1)()",
        "x",
        "'a' * 9",
        "1 +",
        "(" * 999,
        "round(5, -10 ** 9)",
    ],
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


BEGINS_A_DAEMON = """
import ctypes, os, resource, subprocess, sys, threading, time

def begins(way, *args):
    try:
        way(*args)
    except OSError as error:
        print(way.__name__, error.strerror)

program = [sys.executable, "-c", "import time; time.sleep(600)"]
os.setsid() if os.getsid(0) != os.getpid() else None
begins(os.fork)
begins(os.posix_spawn, program[0], program, {})
begins(subprocess.Popen, program)
begins(os.kill, os.getppid(), 9)
begins(os.pidfd_open, os.getppid())
begins(resource.prlimit, os.getppid(), resource.RLIMIT_CPU, (0, 0))
libc = ctypes.CDLL(None, use_errno=True)
for call in ((200, os.getppid(), 9), (234, os.getppid(), os.getppid(), 9), (101, 16, os.getppid()), (157, 1, 0)):
    print(call[0], libc.syscall(*call), ctypes.get_errno())
thread = threading.Thread(target=print, args=("threads work",))
thread.start()
thread.join()
"""


@pytest.mark.process
def test_python_leaves_nothing_running_whatever_the_program_does(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = [f"{way} Operation not permitted" for way in ("fork", "posix_spawn", "Popen", "kill", "pidfd_open")]
    refused += ["prlimit Operation not permitted", "200 -1 1", "234 -1 1", "101 -1 1", "157 -1 1"]
    assert python(BEGINS_A_DAEMON).splitlines() == [*refused, "threads work"]
    with pytest.raises(RuntimeError, match="PermissionError"):
        python("import socket; socket.create_connection(('127.0.0.1', 9))")
    with pytest.raises(RuntimeError, match="MemoryError"):
        python("kept = []\nwhile True: kept.append(bytearray(1 << 24))")
    with pytest.raises(RuntimeError, match=r"exit status (.|\n)*\.\.\. 167\d{5} characters"):
        python("while True: print('x' * 10**6)")
    monkeypatch.setattr(tool_functions, "_SECONDS", 1)
    with pytest.raises(RuntimeError, match="took longer than 1 s"):
        python("import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: pass")
    assert not children_of(os.getpid(), python_program.__file__)


@pytest.mark.process
def test_a_program_ends_with_the_process_that_runs_it() -> None:
    code = "from megarl.environments.tool_functions import python; python('import time; time.sleep(600)')"
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        assert comes_true(lambda: bool(children_of(parent.pid, python_program.__file__)))
        (program,) = children_of(parent.pid, python_program.__file__)
        time.sleep(0.5)
        parent.kill()
    assert comes_true(lambda: not alive(program))


def children_of(parent: int, script: str) -> list[int]:
    """The children of a process that run a script."""
    pids = [int(pid) for file in Path(f"/proc/{parent}/task").glob("*/children") for pid in file.read_text().split()]
    return [pid for pid in pids if script in Path(f"/proc/{pid}/cmdline").read_text()]
