"""Completions and rollouts made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megarl.config.schema import RewardFunction
from megarl.data.packing import sample_infos
from megarl.rewards.functions import Completion
from megarl.types import Prompt, Ragged, RolloutChunk, SampleInfo


def completion(response: str = "", *, tokens: int = 1, finished: bool = True, **fields: Any) -> Completion:
    """A completion of these words and this many tokens."""
    return Completion(
        prompt_id="p0",
        prompt="question",
        response=response,
        prompt_ids=(1, 2),
        response_ids=tuple(range(tokens)),
        finished=finished,
        fields=fields,
    )


def own(name: str, *, weight: float = 1.0, **args: Any) -> RewardFunction:
    """A function of ``functions.py``."""
    return RewardFunction(name=f"tests.rewards.functions:{name}", weight=weight, args=args)


def prompt(text: str, prompt_id: str | None = None, **fields: Any) -> Prompt:
    """A prompt whose ids are its characters' codes."""
    return Prompt(prompt_id=prompt_id or text, token_ids=tuple(map(ord, text)), fields=fields)


def decode(token_ids: Sequence[int]) -> str:
    """The text whose characters' codes are these ids."""
    return "".join(map(chr, token_ids))


def rollout(prompts: Sequence[Prompt], responses: Sequence[str], finished: Sequence[bool]) -> RolloutChunk:
    """A chunk with these responses."""
    ids = Ragged.from_rows([list(map(ord, response)) for response in responses], np.int32)
    return RolloutChunk(
        sample_ids=tuple(f"{row}" for row in range(len(prompts))),
        prompt_ids=Ragged.from_rows([prompt.token_ids for prompt in prompts], np.int32),
        response_ids=ids,
        rollout_logprobs=Ragged(values=np.zeros(len(ids.values), np.float32), offsets=ids.offsets),
        finished=np.array(finished),
        versions=((),) * len(prompts),
    )


def infos(chunk: int, prompts: Sequence[Prompt], rows: RolloutChunk) -> list[SampleInfo]:
    """The driver's records of a chunk."""
    made = sample_infos(chunk, rows, [prompt.prompt_id for prompt in prompts])
    return [replace(info, sample_id=f"{chunk}.{info.row}") for info in made]
