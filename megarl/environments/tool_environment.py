"""An environment that calls Python functions for the model."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ArgsKwargs

from megarl import plugins
from megarl.data.tokenizer import Message
from megarl.environments.environment import Action, Environment, Observation, ToolCall
from megarl.environments.python_program import FIX, Sandbox, bubblewrap, python, python_without_sandbox
from megarl.texts import argument_problems

_ARGUMENT = re.compile(r"^ *(\w+)(?: \(.*?\))?: *(.*(?:\n(?!\s*\w+(?: \(.*?\))?:).*)*)", re.MULTILINE)
"""An entry in the section Args of a docstring: a name, perhaps its type in brackets, and the description."""


class Tool:
    """A function that the model may call; it may be `async`.

    Its schema comes from its annotations, by which arguments are validated, and its docstring,
    which may describe arguments in a section `Args:`.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        target: Any = function  # TypeAdapter is annotated for types alone
        self.name = name
        self._function = function
        self._call = TypeAdapter[Any](target)
        description, _, arguments = (inspect.getdoc(function) or "").partition("Args:\n")
        parameters = self._call.json_schema()
        parameters.pop("additionalProperties", None)
        properties = parameters["properties"]
        section = re.split(r"\n\S", arguments)[0]
        for argument, text in _ARGUMENT.findall(section):
            if argument in properties:
                properties[argument].setdefault("description", " ".join(text.split()))
        for schema in properties.values():
            schema.pop("title", None)
        described = {"name": name, "description": description.strip(), "parameters": parameters}
        self.schema: Mapping[str, Any] = {"type": "function", "function": described}

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Returns what the function returns, as text; raises what it raises, or ValidationError."""
        given = ArgsKwargs((), dict(arguments))
        if inspect.iscoroutinefunction(self._function):
            result = await self._call.validate_python(given)
        else:
            result = await asyncio.to_thread(self._call.validate_python, given)
        if isinstance(result, str):
            return result
        return json.dumps(result, default=str, ensure_ascii=False)


class ToolEnvironment(Environment):
    """Calls tools until the model answers without a call.

    The tools are functions, and the public methods of a subclass. What goes wrong in a call is its
    answer.

    Args:
        functions: python, or package.module:function.
        sandbox: confinement of the programs of the tool `python`; `none` lets them do whatever this
            process can.

    Raises:
        ValueError: a tool cannot be used, or an argument has no effect.
    """

    def __init__(self, functions: Sequence[str] = (), sandbox: Sandbox = "bubblewrap") -> None:
        if sandbox not in get_args(Sandbox):
            raise ValueError(f"sandbox is one of {', '.join(get_args(Sandbox))}, not {sandbox!r}")
        if sandbox == "none" and "python" not in functions:
            raise ValueError("sandbox=none is for the tool python, which is not among the functions")
        tools: list[Tool] = []
        for name, _ in inspect.getmembers(type(self), inspect.isfunction):
            if not name.startswith("_") and not hasattr(ToolEnvironment, name):
                tools.append(Tool(name, getattr(self, name)))
        tools += [_tool(name, sandbox) for name in functions]
        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) < len(tools):
            names = ", ".join(tool.name for tool in tools)
            raise ValueError(f"names of tools differ; they are {names}")
        self.tools = [tool.schema for tool in tools]
        self._calls = 0
        self._failed = 0

    def score(self, answer: Action) -> Any:
        """Returns the reward of the answer, a number; may be `async`."""
        del answer
        return 0.0

    async def step(self, action: Action) -> Observation:
        if not action.finished:
            return Observation(truncated=True, metrics=self._metrics())
        if not action.tool_calls:
            score = self.score(action)
            if inspect.isawaitable(score):
                score = await score
            return Observation(reward=score, done=True, metrics=self._metrics())
        answers = await asyncio.gather(*map(self._answer, action.tool_calls))
        return Observation(messages=answers, metrics=self._metrics())

    async def _answer(self, call: ToolCall) -> Message:
        return call.answer(await self._result(call))

    async def _result(self, call: ToolCall) -> str:
        self._calls += 1
        try:
            if call.problem is not None:
                raise ValueError(call.problem)
            if call.name not in self._tools:
                known = ", ".join(self._tools)
                raise ValueError(f"there is no tool {call.name!r}; there are {known}")
            return await self._tools[call.name].call(call.arguments)
        except ValidationError as error:
            problem = f"arguments of {call.name}: {argument_problems(error)}"
        except (Exception, SystemExit) as error:  # the tool's own code; the model should learn from it
            problem = f"{type(error).__name__}: {error}"
        self._failed += 1
        return f"error: {problem}"

    def _metrics(self) -> dict[str, float]:
        return {"tool_calls": self._calls, "failed_tool_calls": self._failed}


def _tool(name: str, sandbox: Sandbox) -> Tool:
    """Returns a tool by the name of its function; raises ValueError with the broken rule."""
    if name != "python":
        return Tool(name.rpartition(":")[2], plugins.resolve(name, coroutines=True))
    if sandbox == "none":
        return Tool(name, python_without_sandbox)
    try:
        bubblewrap()
    except ValueError as error:
        raise ValueError(f"the tool python: {error}; {FIX}") from error
    return Tool(name, python)
