"""Prompts, the order in which they come, and the samples to draw of each."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from megarl.data.hashing import stable_hash
from megarl.types import Prompt, SampleRequest


def read_prompts(path: str | Path, vocab_size: int) -> list[Prompt]:
    """Reads one prompt per line of JSON.

    Columns: ``token_ids``, a list of ids; ``prompt_id``, optional, a string, else the line number. Others become
    ``fields``.

    Args:
        path: a JSONL file.
        vocab_size: ids must lie below it.

    Raises:
        ValueError: a broken row, with its file, line and reason; or no row at all.
    """
    prompts: list[Prompt] = []
    lines: dict[str, int] = {}
    with Path(path).open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                prompt = _parse(line, f"{number}", vocab_size)
                if prompt.prompt_id in lines:
                    raise ValueError(f"prompt_id {prompt.prompt_id!r} is that of line {lines[prompt.prompt_id]}")
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
            lines[prompt.prompt_id] = number
            prompts.append(prompt)
    if not prompts:
        raise ValueError(f"{path}: no prompts")
    return prompts


def random_prompts(*, count: int, min_tokens: int, max_tokens: int, vocab_size: int, seed: int) -> list[Prompt]:
    """Prompts of random ids, of ``min_tokens`` to ``max_tokens`` of them; prompt i does not depend on ``count``."""
    prompts: list[Prompt] = []
    for index in range(count):
        random = np.random.default_rng([seed, index])
        length = int(random.integers(min_tokens, max_tokens + 1))
        ids = tuple(random.integers(0, vocab_size, size=length).tolist())
        prompts.append(Prompt(prompt_id=f"random-{index}", token_ids=ids))
    return prompts


@dataclass(frozen=True, kw_only=True)
class PromptStreamState:
    """Where a stream stands: the next prompt is number ``position`` of ``epoch``; ``digest`` tells its prompts."""

    epoch: int
    position: int
    digest: int


class PromptStream:
    """An endless stream of prompts: every epoch all of them, in an order of its own.

    The order of an epoch depends on (seed, epoch) and the prompts' ids alone.

    Args:
        prompts: with unique ids.
        seed: of the run.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        if not prompts:
            raise ValueError("a stream needs at least one prompt")
        self._prompts = {prompt.prompt_id: prompt for prompt in prompts}
        if len(self._prompts) != len(prompts):
            raise ValueError("prompt ids must be unique in a stream")
        self._digest = stable_hash(seed, *sorted(self._prompts))
        self._seed = seed
        self._start(epoch=0, position=0)

    def next(self, count: int) -> list[Prompt]:
        """The next prompts, from as many epochs as it takes."""
        taken: list[Prompt] = []
        while len(taken) < count:
            if self._position == len(self._order):
                self._start(epoch=self._epoch + 1, position=0)
            ids = self._order[self._position : self._position + count - len(taken)]
            taken += [self._prompts[prompt_id] for prompt_id in ids]
            self._position += len(ids)
        return taken

    def state(self) -> PromptStreamState:
        """What ``load`` needs to go on from here."""
        return PromptStreamState(epoch=self._epoch, position=self._position, digest=self._digest)

    def load(self, state: PromptStreamState) -> None:
        """Goes on from where ``state`` was taken.

        Raises:
            ValueError: it was taken with other prompts or another seed.
        """
        if state.digest != self._digest:
            raise ValueError("the prompts or the seed are not those of the saved stream; resume with the same ones")
        self._start(epoch=state.epoch, position=state.position)

    def _start(self, *, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        self._order = sorted(self._prompts, key=lambda name: (stable_hash(self._seed, epoch, name), name))


def sample_requests(prompts: Sequence[Prompt], samples_per_prompt: int, *, seed: int, step: int) -> list[SampleRequest]:
    """The samples to draw of a step's prompts, each with a seed from (seed, step, prompt id, sample index) alone.

    A sample's id is ``step/prompt id/sample index``. A prompt that comes twice in a step gets twice the samples.
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
                )
            )
    return requests


def _parse(line: str, default_id: str, vocab_size: int) -> Prompt:
    row: Any = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError("a row must be a JSON object")
    columns = cast(dict[str, Any], row)
    prompt_id = columns.pop("prompt_id", default_id)
    if not isinstance(prompt_id, str) or not prompt_id:
        raise ValueError(f"prompt_id is {prompt_id!r}: it must be a string that is not empty")
    ids = columns.pop("token_ids", None)
    if not isinstance(ids, list) or not ids:
        raise ValueError("token_ids must be a list of one token id or more")
    for token in cast(list[Any], ids):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ValueError(f"token_ids holds {token!r}: ids are integers from 0 to {vocab_size - 1}")
    return Prompt(prompt_id=prompt_id, token_ids=tuple(cast(list[int], ids)), fields=columns)
