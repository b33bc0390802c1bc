"""Environments without tools: turns of the user from the data, and the tasks of reasoning-gym."""

from __future__ import annotations

import importlib
import json
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
        self._turns = list(task.column(self._field))
        if not task.messages and not self._turns:
            raise ValueError(f"the row has neither a prompt nor a text in {self._field}")
        return task.messages or self._next()

    def step(self, action: Action) -> Observation:
        if not self._turns:
            return Observation(done=True)
        return Observation(messages=self._next())

    def _next(self) -> list[Message]:
        return [{"role": "user", "content": self._turns.pop(0)}]


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
        self._entry = self._tasks[int(task.column("index"))]
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
        fix = "pip install -e '.[reasoning-gym]' in MegaRL's directory"
        raise ValueError(f"needs the package reasoning-gym: {fix}") from None
    arguments = {"size": 1 << 30, **json.loads(options)}  # each task is made on demand
    return package.create_dataset(name, seed=seed, **arguments)
