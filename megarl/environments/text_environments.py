"""Environments without tools: turns of the user from the data, a game, and the tasks of reasoning-gym."""

from __future__ import annotations

import importlib
import json
import random
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from megarl.data.tokenizer import Message
from megarl.environments.environment import Action, Environment, EnvironmentTask, Observation


class UserTurns(Environment):
    """Gives the texts of a column of the row as the user's, one after each answer; functions of `reward` score.

    Args:
        field: column with a list of texts.
    """

    def __init__(self, field: str = "user_turns") -> None:
        self._field = field
        self._turns: list[str] = []

    def reset(self, task: EnvironmentTask, seed: int) -> Sequence[Message]:
        self._turns = list(_column(task, self._field))
        return task.messages or self._next()

    def step(self, action: Action) -> Observation:
        if not self._turns:
            return Observation(done=True)
        return Observation(messages=self._next())

    def _next(self) -> list[Message]:
        return [{"role": "user", "content": self._turns.pop(0)}]


class GuessNumber(Environment):
    """A game as plain text: guess a whole number, which follows from the row's `index`.

    The reward is 1 for the number, else 0.

    Args:
        most: largest number; the smallest is 1.
        guesses: number of guesses after which the game ends.
    """

    def __init__(self, most: int = 20, guesses: int = 5) -> None:
        self._most = most
        self._max_guesses = guesses
        self._number = 0
        self._guesses = 0

    def reset(self, task: EnvironmentTask, seed: int) -> str:
        self._number = random.Random(int(_column(task, "index"))).randint(1, self._most)
        return f"Guess a number from 1 to {self._most}.\n"

    def step(self, action: Action) -> Observation:
        self._guesses += 1
        won = False
        answer = "not a number"
        text = action.content.strip()
        if text.isdecimal() and len(text) < 10:
            won = int(text) == self._number
            answer = "larger" if int(text) < self._number else "smaller"
        return Observation(
            messages=f"\n{answer}\n",
            reward=float(won),
            done=won or self._guesses == self._max_guesses,
            metrics={"guesses": float(self._guesses), "won": float(won)},
        )


class ReasoningGym(Environment):
    """A task of the package reasoning-gym, by the row's `index`, in one turn; its own scorer gives the reward.

    The answer is what is last in <answer> and </answer>, or else all of the text.

    Args:
        task: name of a data set, such as chain_sum.
        seed: seed of the data set.
        options: further options of the data set; a few need a `size` that is not large.
    """

    def __init__(self, task: str, seed: int = 0, options: Mapping[str, Any] | None = None) -> None:
        self._tasks = _reasoning_tasks(task, seed, json.dumps(options or {}, sort_keys=True))
        self._entry = dict[str, Any]()

    def reset(self, task: EnvironmentTask, seed: int) -> Sequence[Message]:
        self._entry = self._tasks[int(_column(task, "index"))]
        return [*task.messages, {"role": "user", "content": self._entry["question"]}]

    def step(self, action: Action) -> Observation:
        tagged = re.findall(r"<answer>(.*?)</answer>", action.content, re.DOTALL)
        answer = (tagged or [action.content])[-1].strip()
        score = self._tasks.score_answer(answer=answer, entry=self._entry)
        return Observation(reward=float(score), done=True)


@cache
def _reasoning_tasks(name: str, seed: int, options: str) -> Any:
    try:
        package = importlib.import_module("reasoning_gym")
    except ModuleNotFoundError as error:
        if error.name != "reasoning_gym":
            raise
        fix = "pip install 'megarl-trainer[reasoning-gym]'"
        raise ValueError(f"needs the package reasoning-gym: {fix}") from None
    arguments = {"size": 1 << 30, **json.loads(options)}  # each task is made on demand
    return package.create_dataset(name, seed=seed, **arguments)


def _column(task: EnvironmentTask, name: str) -> Any:
    if name not in task.fields:
        known = ", ".join(task.fields) or "none"
        raise ValueError(f"the row has no column {name!r}; it has: {known}")
    return task.fields[name]
