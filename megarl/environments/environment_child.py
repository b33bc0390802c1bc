"""The child process that runs the environments of many conversations, in one event loop."""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import math
import os
import signal
import threading
import traceback
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, Literal

from megarl.config.schema import EnvironmentSettings
from megarl.environments.builtin import load_environment
from megarl.environments.environment import Environment, Observation
from megarl.stacks import answer_as_child

_PR_SET_PDEATHSIG = 1

Method = Literal["reset", "step", "close"]


@dataclass(frozen=True, kw_only=True)
class EnvironmentCall:
    """A call of a method of a conversation's environment; the answer is (number, Reply or CallFailure)."""

    number: int
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
    """Why a call returned nothing: a sentence, or the environment's traceback.

    Args:
        lost: the environment was gone before the call, with a process that another call ended.
    """

    reason: str
    lost: bool = False


def serve(descriptor: int, parent: int) -> None:
    """Runs in the child: receives the configuration, answers True when the class is loaded, and answers calls.

    Args:
        descriptor: of the connection.
        parent: id of the parent process, with which the child is killed.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    answer_as_child("environments")
    os.set_inheritable(descriptor, False)  # programs that an environment starts must not keep it open
    with Connection(descriptor) as connection:
        config: EnvironmentSettings = connection.recv()
        try:
            make = load_environment(config)
        except ValueError as error:
            connection.send(str(error))
            return
        connection.send(True)
        loop = asyncio.new_event_loop()
        loop.set_default_executor(ThreadPoolExecutor(config.concurrency))  # for methods that are not `async`
        threading.Thread(target=loop.run_forever, daemon=True).start()
        host = EnvironmentHost(make, connection)
        while True:
            try:
                call: EnvironmentCall = connection.recv()
            except EOFError:
                return
            asyncio.run_coroutine_threadsafe(host.answer(call), loop)


class EnvironmentHost:
    """The environments of conversations in progress."""

    def __init__(self, make: Any, connection: Connection[Any, Any]) -> None:
        self._make, self._connection = make, connection
        self._environments: dict[int, Environment] = {}

    async def answer(self, call: EnvironmentCall) -> None:
        """Makes a call, and sends what it returned."""
        try:
            if call.method != "reset" and call.conversation not in self._environments:
                answer = CallFailure(reason="its process has ended", lost=True)
            else:
                answer = await self._call(call)
        except BaseException:  # the user's own code, which may also exit or cancel itself
            answer = CallFailure(reason=traceback.format_exc(limit=-8))
        try:
            self._connection.send((call.number, answer))
        except Exception as error:  # it cannot be pickled
            self._connection.send((call.number, CallFailure(reason=f"{call.method} returned: {error!r}")))

    async def _call(self, call: EnvironmentCall) -> Reply:
        if call.method == "reset":
            self._environments[call.conversation] = self._make()
        environment = self._environments[call.conversation]
        method = getattr(environment, call.method)
        if call.method == "close":
            del self._environments[call.conversation]
        if inspect.iscoroutinefunction(method):
            value = await method(*call.args)
        else:
            value = await asyncio.to_thread(method, *call.args)
            if inspect.isawaitable(value):
                value = await value
        return Reply(observation=_observation(call.method, value), tools=tuple(environment.tools))


def _observation(method: Method, value: Any) -> Observation:
    """Returns what a method returned as an observation; raises TypeError if it is none."""
    if method == "close":
        return Observation()
    if method == "reset" and isinstance(value, str | list | tuple):
        value = Observation(messages=value)  # pyright: ignore[reportUnknownArgumentType]
    if not isinstance(value, Observation):
        expected = "an Observation" + (", messages or a text" if method == "reset" else "")
        raise TypeError(f"{method} returned {value!r:.200}: it must return {expected}")
    ended = value.done or value.truncated
    if ended and method == "reset":
        raise TypeError("reset returned an Observation that is done: the model has a turn at least")
    if not ended and not value.messages:
        raise TypeError(f"{method} returned no messages, and is not done: a turn follows messages or a text")
    if not isinstance(value.messages, str) and not all(_is_message(message) for message in value.messages):
        raise TypeError(f"{method} returned messages {value.messages!r:.200}: each is a dict with a role and more")
    numbers = {name: float(number) for name, number in {"reward": value.reward, **value.metrics}.items()}
    if wrong := [name for name, number in numbers.items() if not math.isfinite(number)]:
        raise TypeError(f"{method} returned {wrong[0]} = {numbers[wrong[0]]}: it must be finite")
    return replace(value, reward=numbers.pop("reward"), metrics=numbers)


def _is_message(message: object) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("role"), str)
