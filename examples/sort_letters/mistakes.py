"""Wrong answers to a question, each of a kind that a model that is still learning gives too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from string import ascii_lowercase
from typing import Final

from examples.sort_letters.task import Question

Mistake = Callable[[Question, Random], str]


def wrong_way(question: Question, random: Random) -> str:
    """Sorted in the other direction."""
    return question.answer[::-1]


def copied(question: Question, random: Random) -> str:
    """The letters as they were given."""
    return question.letters


def shuffled(question: Question, random: Random) -> str:
    """The letters in any order."""
    return "".join(random.sample(question.letters, len(question.letters)))


def swapped(question: Question, random: Random) -> str:
    """Two neighbours of the answer in each other's place."""
    answer, at = question.answer, random.randrange(len(question.answer) - 1)
    return answer[:at] + answer[at + 1] + answer[at] + answer[at + 2 :]


def dropped(question: Question, random: Random) -> str:
    """A letter of the answer left out."""
    answer, at = question.answer, random.randrange(len(question.answer))
    return answer[:at] + answer[at + 1 :]


def doubled(question: Question, random: Random) -> str:
    """A letter of the answer written twice."""
    answer, at = question.answer, random.randrange(len(question.answer))
    return answer[: at + 1] + answer[at:]


def substituted(question: Question, random: Random) -> str:
    """A letter of the answer replaced by one that was not given."""
    answer, at = question.answer, random.randrange(len(question.answer))
    other = random.choice([letter for letter in ascii_lowercase if letter not in answer])
    return answer[:at] + other + answer[at + 1 :]


DEMONSTRATED: Final[Mapping[Mistake, float]] = {
    wrong_way: 0.40,
    copied: 0.10,
    swapped: 0.08,
    dropped: 0.04,
    doubled: 0.03,
}
"""Share of each mistake in the demonstrations; the others are right."""

REJECTED: Final[Mapping[Mistake, float]] = {
    wrong_way: 0.20,
    copied: 0.05,
    shuffled: 0.05,
    swapped: 0.15,
    dropped: 0.20,
    doubled: 0.15,
    substituted: 0.20,
}
"""Share of each mistake in the rejected responses of the preference pairs."""


def wrong_answer(question: Question, random: Random, shares: Mapping[Mistake, float]) -> str:
    """A mistake drawn by its share; again, where it happens to give the right answer."""
    while True:
        (mistake,) = random.choices(list(shares), weights=list(shares.values()))
        if (response := mistake(question, random)) != question.answer:
            return response
