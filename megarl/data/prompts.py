"""Prompts, and the samples to draw of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from megarl.config.schema import Fault, SourceFields
from megarl.data.encoding import PROMPTS, Encoder, first_of
from megarl.data.sources import Row, Rows, parse_rows
from megarl.data.stream import stable_hash
from megarl.data.tokenizer import Tokenizer
from megarl.types import Prompt, SampleRequest


def load_prompts(
    source: SourceFields,
    tokenizer: Tokenizer | None,
    *,
    vocab_size: int,
    chat_template: bool,
    max_tokens: int,
    drop: Collection[Fault] = (),
) -> Rows[Prompt]:
    """Reads prompts.

    A row has ``prompt``, text or a chat, or ``prompt_ids`` (also named ``token_ids``), or ``messages``, a chat. Its id
    is ``prompt_id``, else its number. Its other columns become ``fields``.

    Args:
        source: of the rows.
        tokenizer: None where all rows have ids.
        vocab_size: ids must lie below it.
        chat_template: text prompts are what a user says in a chat.
        max_tokens: of a prompt.
        drop: faults of rows that are left out; rows with others are errors.

    Raises:
        OSError, ValueError: the source cannot be read; rows are broken, of which the first are named with file, line
            and reason; the tokenizer does not fit.
    """
    encoder = Encoder(tokenizer, vocab_size=vocab_size, chat_template=chat_template, max_tokens=max_tokens)
    places: dict[str, str] = {}

    def parse(row: Row, columns: dict[str, Any]) -> Prompt:
        prompt_id = _prompt_id(columns.pop("prompt_id", row.number))
        if prompt_id in places:
            raise ValueError(f"prompt_id {prompt_id!r} is that of {places[prompt_id]}")
        places[prompt_id] = row.where
        names = (*PROMPTS, "messages")
        ids = encoder.prompt(columns, *names)
        encoder.check_length(ids)
        del columns[first_of(columns, *names)]
        return Prompt(prompt_id=prompt_id, token_ids=tuple(ids.tolist()), fields=columns)

    return parse_rows(source, parse, drop)


def _prompt_id(value: object) -> str:
    """The id of a prompt: text, or a number as text."""
    if not isinstance(value, int | str) or isinstance(value, bool) or value == "":
        raise ValueError(f"prompt_id is {value!r}: it must be text that is not empty, or a whole number")
    return str(value)


def random_prompts(*, count: int, min_tokens: int, max_tokens: int, vocab_size: int, seed: int) -> list[Prompt]:
    """Prompts of random ids, of ``min_tokens`` to ``max_tokens`` of them; prompt i does not depend on ``count``."""
    prompts: list[Prompt] = []
    for index in range(count):
        random = np.random.default_rng([seed, index])
        length = int(random.integers(min_tokens, max_tokens + 1))
        ids = tuple(random.integers(0, vocab_size, size=length).tolist())
        prompts.append(Prompt(prompt_id=f"random-{index}", token_ids=ids))
    return prompts


def sample_requests(
    prompts: Sequence[Prompt], samples_per_prompt: int, *, seed: int, step: int, temperature: float | None = None
) -> list[SampleRequest]:
    """The samples to draw of a step's prompts, each with a seed from (seed, step, prompt id, sample index) alone.

    A sample's id is ``step/prompt id/sample index``. A prompt that comes twice in a step gets twice the samples.

    Args:
        temperature: of the samples; None is the rollouts' own.
    """
    drawn: Counter[str] = Counter()
    requests: list[SampleRequest] = []
    for prompt in prompts:
        for _ in range(samples_per_prompt):
            index = drawn[prompt.prompt_id]
            drawn[prompt.prompt_id] += 1
            requests.append(
                SampleRequest(
                    sample_id=f"{step}/{prompt.prompt_id}/{index}",
                    prompt=prompt,
                    seed=stable_hash(seed, step, prompt.prompt_id, index),
                    temperature=temperature,
                )
            )
    return requests


def greedy_requests(prompts: Sequence[Prompt], *, step: int) -> list[SampleRequest]:
    """The likeliest response, token by token, to each different prompt; its id is ``step/prompt id/greedy``."""
    different = {prompt.prompt_id: prompt for prompt in prompts}
    return [
        SampleRequest(sample_id=f"{step}/{prompt_id}/greedy", prompt=prompt, seed=0, temperature=0.0)
        for prompt_id, prompt in different.items()
    ]
