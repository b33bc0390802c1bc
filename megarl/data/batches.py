"""A step of demonstrations or preferences as chunks for the ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megarl.algos.optimization import divided
from megarl.data.encoding import Ids
from megarl.data.training_texts import TrainingText
from megarl.types import Ragged, SampleInfo, TextChunk


def text_batch(items: Sequence[TrainingText], chunks: int) -> tuple[tuple[SampleInfo, ...], tuple[TextChunk, ...]]:
    """Divides demonstrations or preferences into at most `chunks` chunks of about equal sizes.

    The responses of a preference are neighboring rows of a chunk, the best first. A row's id is
    `key/n`, or `key/n/i` for response i of a preference, where n counts the item's occurrences in
    the batch from 0.

    Returns:
        The samples, one per row in order, and the chunks.
    """
    seen: Counter[str] = Counter()
    samples: list[SampleInfo] = []
    made: list[TextChunk] = []
    for part in divided(items, min(chunks, len(items))):
        ids: list[str] = []
        prompts: list[Ids] = []
        responses: list[Ids] = []
        margins: list[float | None] = []
        desirable: list[bool | None] = []
        for item in part:
            name = f"{item.key}/{seen[item.key]}"
            seen[item.key] += 1
            for index, response in enumerate(item.responses):
                sample_id = name if len(item.responses) == 1 else f"{name}/{index}"
                sample = SampleInfo(
                    sample_id=sample_id,
                    prompt_id=item.key,
                    chunk=len(made),
                    row=len(ids),
                    prompt_tokens=len(item.prompt_ids),
                    response_tokens=len(response),
                    finished=True,
                )
                samples.append(sample)
                ids.append(sample_id)
                prompts.append(item.prompt_ids)
                responses.append(response)
                margins.append(item.margin)
                desirable.append(item.desirable)
        chunk = TextChunk(
            sample_ids=tuple(ids),
            prompt_ids=Ragged.from_rows(prompts, np.int32),
            response_ids=Ragged.from_rows(responses, np.int32),
            margins=None if None in margins else np.array(margins, dtype=np.float32),
            desirable=None if None in desirable else np.array(desirable, dtype=np.float32),
        )
        made.append(chunk)
    return tuple(samples), tuple(made)


def on_all_tokens(samples: Sequence[SampleInfo]) -> list[SampleInfo]:
    """Returns the rows with all tokens but the first as response, for losses on all tokens."""
    changed: list[SampleInfo] = []
    for sample in samples:
        response = sample.tokens - 1
        changed.append(replace(sample, prompt_tokens=1, response_tokens=response, given_tokens=0))
    return changed
