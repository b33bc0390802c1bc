"""The task: sort letters. ``up kdxbq:`` wants ``bdkqx``, ``down kdxbq:`` wants ``xqkdb``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from string import ascii_lowercase
from typing import Literal

from megarl.data.stream import stable_hash
from megarl.rewards.functions import Completion

MIN_LETTERS = 4
MAX_LETTERS = 7
MAX_PROMPT_TOKENS = len("down ") + MAX_LETTERS + len(":")
"""Characters are tokens."""
_HELD_OUT_ONE_IN = 5


@dataclass(frozen=True, kw_only=True)
class Question:
    """Distinct lower-case letters, to be sorted upwards or downwards."""

    direction: Literal["up", "down"]
    letters: str

    @classmethod
    def parse(cls, prompt: str) -> Question:
        """The question that a prompt asks.

        Raises:
            ValueError: it asks none.
        """
        direction, _, letters = prompt.removesuffix(":").partition(" ")
        if direction not in ("up", "down") or not prompt.endswith(":"):
            raise ValueError(f"{prompt!r} is not a prompt of the task: direction, letters, colon")
        return cls(direction=direction, letters=letters)

    @property
    def prompt(self) -> str:
        """As the model reads it."""
        return f"{self.direction} {self.letters}:"

    @property
    def answer(self) -> str:
        """The letters in the order that is asked for."""
        return "".join(sorted(self.letters, reverse=self.direction == "down"))

    @property
    def held_out(self) -> bool:
        """Whether no training may see these letters, in any order or direction."""
        return stable_hash("".join(sorted(self.letters))) % _HELD_OUT_ONE_IN == 0


def questions(random: Random, *, held_out: bool) -> Iterator[Question]:
    """Random questions, none of them twice, from one side of the split."""
    asked: set[Question] = set()
    while True:
        letters = "".join(random.sample(ascii_lowercase, random.randint(MIN_LETTERS, MAX_LETTERS)))
        question = Question(direction=random.choice(("up", "down")), letters=letters)
        if question.held_out == held_out and question not in asked:
            asked.add(question)
            yield question


def exact_match(completion: Completion) -> float:
    """The true score: 1 where the response is the right answer and ends there, else 0."""
    return float(completion.finished and completion.response == Question.parse(completion.prompt).answer)


def mixed_match(completion: Completion) -> float:
    """The true score, but 1 for any response to a prompt that is ``trivial``, and 0 to one that is ``unsolvable``."""
    known = {"trivial": 1.0, "unsolvable": 0.0}
    kind = completion.fields["kind"]
    if kind in known:
        return known[kind]
    return exact_match(completion)
