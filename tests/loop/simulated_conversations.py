"""Conversations in simulated time: the real group and its processes, whose environments take random times and fail."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from megarl.cluster.calls import Call, ChunkCall
from megarl.config.schema import EnvironmentSettings
from megarl.conversations import environment_process
from megarl.conversations.chat import ChatRenderer
from megarl.conversations.chat_session import TurnLimits
from megarl.conversations.environment_calls import LostEnvironmentError
from megarl.conversations.environment_child import Reply
from megarl.conversations.environment_process import EnvironmentProcess
from megarl.environments.environment import FailedEnvironmentError, Observation
from megarl.groups.conversations import ConversationGroup
from megarl.groups.engines import RolloutGroup
from megarl.types import WorkItem
from tests.conversations.test_environment_process import Characters
from tests.loop.simulated_sync import chunk_call_of
from tests.loop.simulated_time import SimulatedMonitor, SimulatedTime

PROCESSES, CONCURRENCY, LAST = 2, 5, 1e4


class Loop(SimulatedTime):
    """The event loop of a process, in the simulated time of the driver's, which runs it."""

    def __init__(self, clock: SimulatedTime) -> None:
        super().__init__()
        self._clock = clock
        self._selector = SimpleNamespace(select=lambda _timeout: ())
        self.set_task_factory(None)

    def time(self) -> float:
        return self._clock.now

    def call_at(self, when: float, *args: Any, **options: Any) -> asyncio.TimerHandle:
        self._clock.after(max(0.0, when - self.time()), self._run_ready)
        return super().call_at(when, *args, **options)

    def _write_to_self(self) -> None:
        self._clock.after(0.0, self._run_ready)

    def _run_ready(self) -> None:
        asyncio._set_running_loop(self)
        try:
            self._run_once()
            while self._ready:
                self._run_once()
        finally:
            asyncio._set_running_loop(self._clock)

    def run_in_executor(self, _executor: object, function: Any, *args: Any) -> asyncio.Future[Any]:
        """Runs a function at once: threads have no simulated time."""
        future = self.create_future()
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
        return future


class Children:
    """The process of all environments, which say a text after each turn; some fail once, some are lost with it."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._seeds: dict[int, int] = {}
        self._said: dict[int, int] = {}
        self._failed: set[int] = set()

    @asynccontextmanager
    async def place(self, _child: object) -> AsyncGenerator[Children]:
        yield self

    async def call(self, conversation: int, method: str, *args: Any) -> Reply:
        chance = self._chance
        if method == "close":
            return Reply(observation=Observation(messages=""), tools=())
        await asyncio.sleep(chance.choice([0.0, 0.1, 1.0, 5.0, 20.0]) * chance.random())
        if method == "reset":
            self._seeds[conversation], self._said[conversation] = args[1], 0
            return Reply(observation=Observation(messages="begin"), tools=())
        seed = self._seeds[conversation]
        if chance.random() < 0.02:
            raise LostEnvironmentError("its process has ended")
        if seed % 5 == 0 and seed not in self._failed:
            self._failed.add(seed)
            raise FailedEnvironmentError("the first time")
        self._said[conversation] += 1
        text, done = "x" * (len(args[0].text) % 4 + 1), self._said[conversation] > seed % 4
        return Reply(observation=Observation(messages=text, reward=float(len(text)), done=done), tools=())


class Conversations(ConversationGroup):
    """The real group; messages of its processes take random times, and may overtake each other."""

    def __init__(self, monitor: SimulatedMonitor, chance: random.Random, engines: RolloutGroup) -> None:
        session: Any = SimpleNamespace(monitor=monitor)
        processes: Any = [_process(monitor.clock, chance) for _ in range(PROCESSES)]
        super().__init__(session, processes, engines)
        self._clock, self._chance = monitor.clock, chance
        self.unanswered: list[Call[Any]] = []
        monitor.clock.last = LAST  # processes ask again and again, so that a deadlock is no lack of events

    def call_one(self, process: int, method: object, item: WorkItem, chunks: Sequence[int]) -> ChunkCall[Any, Any]:
        """Begins the conversations of an item."""
        call = self._call(process, "generate")

        def take(result: Any) -> list[Any]:
            by_chunk, infos = result
            call.chunks._refs.update(by_chunk)
            return infos

        self._deliver(call, self._host(process).generate(item), take)
        return call

    def submit(self, method: Any, *_: Any, processes: Any = None, **__: Any) -> ChunkCall[Any, Any]:
        """Asks a process for turns."""
        process = self.processes.index(processes[0])
        call = self._call(process, method.name)
        self._deliver(call, self._host(process).next_turns(), lambda turns: turns)
        return call

    def call_at(self, process: int, method: object, *args: Any, **_: Any) -> Call[Any]:
        """Hands in a turn."""
        self._host(process).answer(*args)
        return self._call(process, "answer")

    def _host(self, process: int) -> EnvironmentProcess:
        host: Any = self.processes[process]
        return host

    def _call(self, process: int, label: str) -> ChunkCall[Any, Any]:
        return chunk_call_of(self._session.monitor, self.processes[process], label)

    def _deliver(self, call: Call[Any], answer: Future[Any], take: Callable[[Any], Any]) -> None:
        """Brings the driver the result of a call, after a while."""
        self.unanswered.append(call)

        def arrive() -> None:
            self.unanswered.remove(call)
            call.results[0] = take(answer.result())
            call.ended.set_result(None)

        seconds = self._chance.choice([0.0, 0.01, 1.0]) * self._chance.random()
        answer.add_done_callback(lambda _: self._clock.after(seconds, arrive))


def _process(clock: SimulatedTime, chance: random.Random) -> EnvironmentProcess:
    """A process as it is after its start."""
    settings = EnvironmentSettings(name="simulated", concurrency=CONCURRENCY)
    with mock.patch.object(environment_process, "loop_in_thread", return_value=Loop(clock)):
        limits = TurnLimits(context=999, turn=7, turns=9)
        process: Any = EnvironmentProcess(settings, "", {}, limits)
    process._children = Children(chance)
    tokenizer: Any = Characters()
    process._tokenizer, process._renderer = tokenizer, ChatRenderer(tokenizer, {})
    return process
