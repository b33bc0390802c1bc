"""Environments of the tests."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from megarl.environments.environment import Action, Environment, EnvironmentTask, Observation


class Letters(Environment):
    """Asks for letters, one a turn, as texts that follow as they are."""

    def __init__(self, turns: int = 3) -> None:
        self._turns = turns

    def reset(self, task: EnvironmentTask, seed: int) -> str:
        self._random = random.Random(seed)
        self._asked = 0
        return self._question()

    def step(self, action: Action) -> Observation:
        self._asked += 1
        right = action.content.strip() == self._letter
        done = self._asked == self._turns
        return Observation(messages=self._question(), reward=float(right), done=done, metrics={"asked": self._asked})

    def _question(self) -> str:
        self._letter = self._random.choice("abc")
        return f"say {self._letter}: "


class Chat(Environment):
    """Talks in messages; the user's next message repeats the answer."""

    def __init__(self, turns: int = 3, pause: float = 0.0) -> None:
        self._turns, self._pause = turns, pause

    async def step(self, action: Action) -> Observation:
        await asyncio.sleep(self._pause)
        self._turns -= 1
        told: list[Any] = [{"role": "user", "content": f"you said {len(action.content)} letters"}]
        return Observation(messages=told, reward=len(action.content) / 10, done=self._turns == 0)
