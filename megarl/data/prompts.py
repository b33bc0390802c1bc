"""Prompts, and the sample requests made from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from megarl.config.schema import Fault, SourceFields
from megarl.data.encoding import PROMPTS, Encoder, first_column
from megarl.data.sources import Row, Rows, parse_rows
from megarl.data.stream import stable_hash
from megarl.types import Prompt, SampleRequest


def load_prompts(
    source: SourceFields, encoder: Encoder, *, drop: Collection[Fault] = (), optional: bool = False
) -> Rows[Prompt]:
    """Reads prompts (columns: docs/data.md); other columns become `fields`. See `parse_rows`.

    Args:
        optional: whether rows may have no prompt, as their environment begins the conversation.
    """
    places: dict[str, str] = {}

    def parse(row: Row, columns: dict[str, Any]) -> Prompt:
        given = columns.pop("prompt_id", row.number)
        if not isinstance(given, int | str) or isinstance(given, bool) or given == "":
            raise ValueError(f"prompt_id is {given!r}: it must be text that is not empty, or a whole number")
        prompt_id = str(given)
        if prompt_id in places:
            raise ValueError(f"prompt_id {prompt_id!r} is that of {places[prompt_id]}")
        places[prompt_id] = row.where
        names = (*PROMPTS, "messages")
        if optional and not columns.keys() & set(names):
            return Prompt(prompt_id=prompt_id, token_ids=(), fields=columns)
        ids = encoder.prompt(columns, *names)
        encoder.check_length(ids)
        name = first_column(columns, *names)
        chat = encoder.messages(name, columns.pop(name))
        return Prompt(prompt_id=prompt_id, token_ids=tuple(ids.tolist()), fields=columns, messages=chat)

    return parse_rows(source, parse, drop)


def random_prompts(*, count: int, min_tokens: int, max_tokens: int, vocab_size: int, seed: int) -> list[Prompt]:
    """Returns prompts of random ids; prompt i does not depend on `count`."""
    prompts: list[Prompt] = []
    for index in range(count):
        random = np.random.default_rng([seed, index])
        length = int(random.integers(min_tokens, max_tokens + 1))
        ids = tuple(random.integers(0, vocab_size, size=length).tolist())
        prompts.append(Prompt(prompt_id=f"random-{index}", token_ids=ids))
    return prompts


def task_prompts(count: int, first: int = 0) -> list[Prompt]:
    """Returns rows for environments that make tasks: each has its `index`, and no prompt."""
    indices = range(first, first + count)
    return [Prompt(prompt_id=f"task-{index}", token_ids=(), fields={"index": index}) for index in indices]


def sample_requests(
    prompts: Sequence[Prompt], samples_per_prompt: int, *, seed: int, step: int, temperature: float | None = None
) -> list[SampleRequest]:
    """Returns the requests of a step; seeds depend on (seed, step, prompt id, sample index) alone.

    A sample's id is `step/prompt id/sample index`. A prompt that occurs twice gets
    twice the samples.

    Args:
        temperature: temperature of the samples; None is that of the configuration.
    """
    drawn: Counter[str] = Counter()
    requests: list[SampleRequest] = []
    for prompt in prompts:
        for _ in range(samples_per_prompt):
            index = drawn[prompt.prompt_id]
            drawn[prompt.prompt_id] += 1
            request = SampleRequest(
                sample_id=f"{step}/{prompt.prompt_id}/{index}",
                prompt=prompt,
                seed=stable_hash(seed, step, prompt.prompt_id, index),
                temperature=temperature,
            )
            requests.append(request)
    return requests


def greedy_requests(prompts: Sequence[Prompt], *, step: int) -> list[SampleRequest]:
    """Returns one greedy request per distinct prompt, with the id `step/prompt id/greedy`."""
    requests: dict[str, SampleRequest] = {}
    for prompt in prompts:
        sample_id = f"{step}/{prompt.prompt_id}/greedy"
        requests[sample_id] = SampleRequest(sample_id=sample_id, prompt=prompt, seed=0, temperature=0.0)
    return list(requests.values())
