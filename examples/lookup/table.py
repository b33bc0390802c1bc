"""The environment: a table that only it knows."""

from __future__ import annotations

import random

from megarl.environments.environment import Action, Environment, EnvironmentTask, Observation

KEYS = "abcdefgh"


class Table(Environment):
    """Says a key as `c>`. The model may ask with `?c`, and is told the value as `=47>`; another text is its answer."""

    def reset(self, task: EnvironmentTask, seed: int) -> str:
        chance = random.Random(int(task.fields["index"]))
        self._values = {key: f"{chance.randrange(100):02}" for key in KEYS}
        self._key = chance.choice(KEYS)
        self._asked = 0
        return f"{self._key}>"

    def step(self, action: Action) -> Observation:
        if action.content.startswith("?"):
            self._asked += 1
            value = self._values.get(action.content[1:], "!!")
            return Observation(messages=f"={value}>", metrics={"asked": self._asked})
        right = action.content == self._values[self._key]
        return Observation(reward=float(right), done=True, metrics={"asked": self._asked})
