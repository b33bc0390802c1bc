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
    """Lets the user say the texts of a column of the row, one after each answer; the functions of `reward` score.

    Args:
        field: the column, a list of texts.
    """

    def __init__(self, field: str = "user_turns") -> None:
        self._field = field
        self._turns: list[str] = []

    def reset(self, task: EnvironmentTask, seed: int) -> Sequence[Message]:
        self._turns = list(_column(task, self._field))
        return task.messages or self._next()

    def step(self, action: Action) -> Observation:
        return Observation(messages=self._next()) if self._turns else Observation(done=True)

    def _next(self) -> list[Message]:
        return [{"role": "user", "content": self._turns.pop(0)}]


class GuessNumber(Environment):
    """A game as plain text: guess a whole number, which follows from the row's `index`.

    The reward is 1 for the number, else 0.

    Args:
        most: the largest number; the least one is 1.
        guesses: after which the game ends.
    """

    def __init__(self, most: int = 20, guesses: int = 5) -> None:
        self._most = most
        self._left = guesses
        self._number = self._guesses = 0

    def reset(self, task: EnvironmentTask, seed: int) -> str:
        self._number = random.Random(int(_column(task, "index"))).randint(1, self._most)
        return f"Guess a number from 1 to {self._most}.\n"

    def step(self, action: Action) -> Observation:
        self._guesses += 1
        guess = int(text) if (text := action.content.strip()).isdecimal() and len(text) < 10 else None
        won = guess == self._number
        if guess is None:
            answer = "not a number"
        else:
            answer = "larger" if guess < self._number else "smaller"
        metrics = {"guesses": float(self._guesses), "won": float(won)}
        return Observation(
            messages=f"\n{answer}\n", reward=float(won), done=won or self._guesses == self._left, metrics=metrics
        )


class ReasoningGym(Environment):
    """A task of the package reasoning-gym, by the row's `index`, in one turn; its own scorer gives the reward.

    The answer is what is last in <answer> and </answer>, or else all of the text.

    Args:
        task: name of a data set, such as chain_sum.
        seed: of the data set.
        options: further ones of the data set; a few need a `size` that is not large.
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


_TASKS = 1 << 30
"""Of a data set, which makes each when it is asked for."""


@cache
def _reasoning_tasks(name: str, seed: int, options: str) -> Any:
    try:
        package = importlib.import_module("reasoning_gym")
    except ModuleNotFoundError as error:
        if error.name != "reasoning_gym":
            raise
        raise ValueError("needs the package reasoning-gym: pip install 'megarl-trainer[reasoning-gym]'") from None
    return package.create_dataset(name, seed=seed, **{"size": _TASKS, **json.loads(options)})


def _column(task: EnvironmentTask, name: str) -> Any:
    if name not in task.fields:
        raise ValueError(f"the row has no column {name!r}; it has: {', '.join(task.fields) or 'none'}")
    return task.fields[name]
