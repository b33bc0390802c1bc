"""Reward functions as a user writes them, good ones and bad ones."""

from __future__ import annotations

import os
from typing import Any

from megarl.rewards import Answer

NUMBER = 3


class Length:
    """Not a function."""


def length(answer: Answer, *, scale: float = 1.0) -> float:
    return scale * len(answer.response_ids)


def seen(answer: Answer) -> float:
    """1 where everything is there that a function may read."""
    return float(
        answer.fields["answer"] == answer.response
        and answer.prompt == f"p{answer.prompt_id}"
        and answer.finished == (answer.prompt_id != "b")
    )


def process(answer: Answer) -> float:
    """The process that scores."""
    return float(os.getpid())


def anything(answer: Answer) -> Any:
    """What the prompt's row says."""
    return answer.fields["returns"]


def quotient(answer: Answer, *, size: int) -> float:
    return 1.0 / (len(answer.response_ids) - size)


async def later(answer: Answer) -> float:
    return 1.0


def score(answer: Answer) -> float:
    """A name that is taken."""
    return 1.0


def contains_2(answer: Answer) -> float:
    """A name that numbering makes, too."""
    return 1.0
