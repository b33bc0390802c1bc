"""Reward functions whose calls overlap, and functions in the signatures of other systems."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megarl.rewards.functions import Completion

_busy = 0
_lock = threading.Lock()
_meetings: dict[str, asyncio.Barrier | threading.Barrier] = {}


async def meets(completion: Completion, *, parties: int) -> float:
    """Returns once so many calls are in progress together."""
    barrier = _meetings.setdefault("async", asyncio.Barrier(parties))
    assert isinstance(barrier, asyncio.Barrier)
    await barrier.wait()
    return float(completion.prompt_id)


def meets_in_threads(completion: Completion, *, parties: int) -> float:
    with _lock:
        barrier = _meetings.setdefault("threads", threading.Barrier(parties))
    assert isinstance(barrier, threading.Barrier)
    barrier.wait()
    return float(completion.prompt_id)


async def crowd(completion: Completion) -> float:
    """How many calls are in progress while it waits."""
    global _busy
    _busy += 1
    seen = 0
    for _ in range(5):
        await asyncio.sleep(0.01)
        seen = max(seen, _busy)
    _busy -= 1
    return float(seen)


async def last_first(completion: Completion) -> float:
    """Finishes in the reverse order of the prompts' numbers, of which there are 8."""
    await asyncio.sleep(0.05 * (8 - int(completion.prompt_id)))
    return float(completion.prompt_id)


async def fails_on_two(completion: Completion, *, way: str) -> float:
    """Returns the process, but for prompt 2."""
    if completion.prompt_id == "2":
        match way:
            case "exits":
                sys.exit("no answer")
            case "interrupts":
                raise KeyboardInterrupt
            case "raises":
                raise ConnectionError("the judge is asleep")
            case _:
                await asyncio.sleep(600)
    await asyncio.sleep(0.1)
    return float(os.getpid())


def stops_on_two(completion: Completion) -> float:
    if completion.prompt_id == "2":
        raise KeyboardInterrupt
    return float(os.getpid())


async def dies_on_two(completion: Completion) -> float:
    """Ends the process while other calls are in progress."""
    await asyncio.sleep(0.05)
    if completion.prompt_id == "2":
        os._exit(3)
    await asyncio.sleep(0.2)
    return float(completion.prompt_id)


def sleeps_on_two(completion: Completion) -> float:
    if completion.prompt_id == "2":
        time.sleep(600)
    return float(completion.prompt_id)


def counts_calls(completion: Completion, *, notes: str) -> float:
    """The length of the response; notes every call."""
    with Path(notes).open("a") as file:
        file.write(f"{completion.prompt_id} {completion.response}\n")
    return float(len(completion.response))


def ranks(completions: list[Completion]) -> list[int | None]:
    """The place of each response by length, from 0; None of empty ones."""
    order = sorted(len(completion.response) for completion in completions)
    return [order.index(len(c.response)) if c.response else None for c in completions]


async def lengths(completions: list[Completion]) -> list[int]:
    return [len(completion.response) for completion in completions]


async def sizes(completions: list[Completion]) -> list[float]:
    return [float(len(completions))] * len(completions)


def trl_reward(
    prompts: list[Any],
    completions: list[Any],
    completion_ids: list[list[int]],
    answer: list[str],
    log_metric: Callable[[str, float], None],
    **columns: Any,
) -> list[float | None]:
    """A function as in TRL's documentation; None where there is nothing to score."""
    log_metric("seen", len(columns["level"]))
    texts = [completion if isinstance(completion, str) else completion[0]["content"] for completion in completions]
    asked = [prompt if isinstance(prompt, str) else prompt[-1]["content"] for prompt in prompts]
    return [
        None if wanted is None else float(text == wanted) + len(ids) / 100 + 10 * (question == "1+1?")
        for text, ids, wanted, question in zip(texts, completion_ids, answer, asked, strict=True)
    ]


async def trl_short(completions: list[str], *, scale: float) -> list[float]:
    """Takes only the arguments that it needs."""
    await asyncio.sleep(0)
    return [scale * len(completion) for completion in completions]


def verl_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    assert data_source == "sums"
    assert extra_info is not None
    return {"score": float(solution_str == ground_truth) - extra_info.get("penalty", 0.0), "acc": 1.0}


def verl_batch(
    data_sources: list[str], solution_strs: list[str], ground_truths: list[str], extra_infos: list[Any], *, bonus: float
) -> list[float]:
    return [bonus + (one == other) for one, other in zip(solution_strs, ground_truths, strict=True)]
