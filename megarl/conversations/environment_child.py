"""The child process that runs the environments of many conversations, in one event loop."""

from __future__ import annotations

import asyncio
import inspect
import math
import pickle
import traceback
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, Literal

from megarl.config.schema import EnvironmentSettings
from megarl.environments.builtin import load_environment
from megarl.environments.environment import Environment, Observation
from megarl.rewards.child_process import Loaded, loop_in_thread
from megarl.texts import printable_name

_THREADS = 4
"""Threads per conversation: calls of tools overlap, and a call that hangs keeps its thread."""
_CANCEL_S = 1.0
"""Time for a late call to be canceled."""

Method = Literal["reset", "step", "close"]


@dataclass(frozen=True, kw_only=True)
class EnvironmentCall:
    """A call of a method of a conversation's environment; the answer is a pickled Reply or CallFailure."""

    conversation: int
    method: Method
    args: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a method returned, and the tools that are offered from now on."""

    observation: Observation
    tools: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class CallFailure:
    """Why a call returned nothing: a sentence, or the environment's traceback; a late one may be in progress."""

    reason: str
    late: bool = False


def load(settings: EnvironmentSettings, connection: Connection[Any, Any]) -> Loaded:
    """Runs in the child: loads the class, which conversations have environments of."""
    return True, EnvironmentHost(settings, connection).answer


class EnvironmentHost:
    """The environments of conversations in progress; raises what `load_environment` raises."""

    def __init__(self, settings: EnvironmentSettings, connection: Connection[Any, Any]) -> None:
        self._make = load_environment(settings)
        self._connection = connection
        self._limit_s = settings.time_limit
        self._environments: dict[int, Environment] = {}
        self._loop = loop_in_thread()
        # For methods that are not `async`.
        self._loop.set_default_executor(ThreadPoolExecutor(_THREADS * settings.concurrency))

    def answer(self, number: int, call: EnvironmentCall) -> None:
        """Begins a call; returns at once."""
        asyncio.run_coroutine_threadsafe(self._answer(number, call), self._loop)

    async def _answer(self, number: int, call: EnvironmentCall) -> None:
        """Makes a call, and sends what it returned; a late one is canceled, or left in its thread."""
        calling = asyncio.create_task(self._call(call))
        await asyncio.wait((calling,), timeout=self._limit_s)
        if calling.done():
            answer = calling.result()
        else:
            calling.cancel()
            await asyncio.wait((calling,), timeout=_CANCEL_S)
            limit = f"environment.time_limit = {self._limit_s:g} s"
            answer = CallFailure(reason=f"{call.method} took longer than {limit}", late=True)
        try:
            sent = pickle.dumps(answer)
        except Exception as error:
            sent = pickle.dumps(CallFailure(reason=f"{call.method} returned: {error!r}"))
        self._connection.send((number, sent))

    async def _call(self, call: EnvironmentCall) -> Reply | CallFailure:
        try:
            observation = _observation(call.method, await self._value(call))
            environment = self._environments.get(call.conversation, Environment())
            return Reply(observation=observation, tools=tuple(environment.tools))
        except BaseException:  # the user's own code, which may also exit or cancel itself
            return CallFailure(reason=traceback.format_exc(limit=-8))

    async def _value(self, call: EnvironmentCall) -> Any:
        if call.method == "reset":
            self._environments[call.conversation] = self._make()
        elif call.method == "close" and call.conversation not in self._environments:
            return None  # it could not be made
        method = getattr(self._environments[call.conversation], call.method)
        if call.method == "close":
            del self._environments[call.conversation]
        if inspect.iscoroutinefunction(method):
            return await method(*call.args)
        value = await asyncio.to_thread(method, *call.args)
        if inspect.isawaitable(value):
            value = await value
        return value


def _observation(method: Method, value: Any) -> Observation:
    """Returns what a method returned as an observation; raises TypeError if it is none."""
    if method == "close":
        return Observation()
    if method == "reset" and isinstance(value, str | list | tuple):
        value = Observation(messages=value)  # pyright: ignore[reportUnknownArgumentType]
    if not isinstance(value, Observation):
        expected = "an Observation, messages or a text" if method == "reset" else "an Observation"
        raise TypeError(f"{method} returned {value!r:.200}: it must return {expected}")
    ended = value.done or value.truncated
    if ended and method == "reset":
        raise TypeError("reset returned an Observation that is done: the model has a turn at least")
    if not ended and not value.messages:
        raise TypeError(f"{method} returned no messages, and is not done: a turn follows messages or a text")
    if not isinstance(value.messages, str) and not all(map(_is_message, value.messages)):
        raise TypeError(f"{method} returned messages {value.messages!r:.200}: each is a dict with a role and more")
    metrics: dict[str, float] = {}
    for name, number in value.metrics.items():
        metrics[printable_name(name)] = _finite(number, f"{method} returned {printable_name(name)}")
    reward = _finite(value.reward, f"{method} returned reward")
    return replace(value, reward=reward, metrics=metrics)


def _finite(number: float, what: str) -> float:
    number = float(number)
    if not math.isfinite(number):
        raise TypeError(f"{what} = {number}: it must be finite")
    return number


def _is_message(message: object) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("role"), str)
