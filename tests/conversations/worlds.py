"""Environments of the tests."""

from __future__ import annotations

import asyncio
import os
import random
import re
import time
from typing import Any, ClassVar

from megarl.environments.environment import Action, Environment, EnvironmentTask, Observation


class Letters(Environment):
    """Asks for letters, one a turn, as texts that follow as they are; waits up to `pause` seconds after each turn."""

    def __init__(self, turns: int = 3, pause: float = 0.0) -> None:
        self._turns, self._pause = turns, pause

    def reset(self, task: EnvironmentTask, seed: int) -> str:
        self._random, self._pauses = random.Random(seed), random.Random(seed + 1)
        self._asked = 0
        return self._question()

    async def step(self, action: Action) -> Observation:
        await asyncio.sleep(self._pause * self._pauses.random())
        self._asked += 1
        right = action.content.strip() == self._letter
        done = self._asked == self._turns
        return Observation(messages=self._question(), reward=float(right), done=done, metrics={"asked": self._asked})

    def _question(self) -> str:
        self._letter = self._random.choice("abc")
        return f"say {self._letter}: "


class Faulty(Environment):
    """Says what its row tells, and fails in the way that it names."""

    begun: ClassVar[set[str]] = set()

    def reset(self, task: EnvironmentTask, seed: int) -> Any:
        self._way = task.fields.get("way")
        if self._way == "reset":
            raise KeyError("nothing here")
        if self._way == "begins with megabytes":
            return "abcdefgh" * 1_000_000
        return {"nonsense": 7, "silent": []}.get(str(self._way), "go: ")

    async def step(self, action: Action) -> Any:
        match self._way:
            case "blocks the loop":
                time.sleep(60)
            case "holds the interpreter":
                re.match(r"(a+)+$", "a" * 40 + "b")
            case "slow":
                await asyncio.sleep(0.5)
            case "blocks":
                await asyncio.to_thread(time.sleep, 2)
            case "step":
                raise RuntimeError("no way")
            case "half a character":
                raise ValueError(f"{'x' * 1_000_000}\nbad \ud800")
            case "metric of half a character":
                return Observation(reward=1.0, done=True, metrics={"m\ud800": 1.0})
            case "megabytes":
                return Observation(messages="abcdefgh" * 1_000_000)
            case "once" if self._way not in self.begun:
                self.begun.add("once")
                raise RuntimeError("the first time")
            case "hangs":
                await asyncio.sleep(60)
            case "nan":
                return Observation(reward=float("nan"), done=True)
            case "pending":
                return None
            case _:
                await asyncio.sleep(0.05)
        return Observation(reward=1.0, done=True, metrics={"length": len(action.content)})

    async def close(self) -> None:
        if self._way == "hangs at its end":
            await asyncio.sleep(60)


class Chat(Environment):
    """Talks in messages; the user's next message repeats the answer."""

    def __init__(self, turns: int = 3, pause: float = 0.0) -> None:
        self._turns, self._pause = turns, pause

    async def step(self, action: Action) -> Observation:
        await asyncio.sleep(self._pause)
        self._turns -= 1
        told: list[Any] = [{"role": "user", "content": f"you said {len(action.content)} letters"}]
        return Observation(messages=told, reward=len(action.content) / 10, done=self._turns == 0)


class Echo(Environment):
    """Begins with what its row says, or with the id of its process."""

    def reset(self, task: EnvironmentTask, seed: int) -> str:
        return task.fields.get("says", str(os.getpid()))
