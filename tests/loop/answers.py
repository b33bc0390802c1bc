"""Calls that have their answers, and the loop in which a test awaits them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any

from megarl.types import SampleInfo


def info(sample_id: str, prompt_id: str, row: int, **others: Any) -> SampleInfo:
    """A finished sample of a chunk, one token of prompt and one of response, unless others are given."""
    usual = {"chunk": 0, "prompt_tokens": 1, "response_tokens": 1, "finished": True}
    return SampleInfo(sample_id=sample_id, prompt_id=prompt_id, row=row, **{**usual, **others})


class Answered:
    """A call with these results; `values` are further attributes."""

    def __init__(self, *results: Any, **values: Any) -> None:
        self.results = list(results)
        for name, value in values.items():
            setattr(self, name, value)

    def __await__(self) -> Generator[Any, None, list[Any]]:
        yield from ()
        return self.results

    async def longest(self) -> float:
        return 2.0


async def answer[T](value: T) -> T:
    """Returns a value that is known."""
    return value


def run[T](work: Coroutine[Any, Any, T]) -> T:
    """Runs work to its end in a loop like the driver's."""
    with asyncio.Runner() as runner:
        runner.get_loop().set_task_factory(asyncio.eager_task_factory)
        return runner.get_loop().run_until_complete(work)
