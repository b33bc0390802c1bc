"""A step of demonstrations or preferences as chunks for the ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megarl.algos.optimization import divided
from megarl.data.demonstrations import Demonstration
from megarl.data.encoding import Ids
from megarl.data.preferences import Preference
from megarl.types import Ragged, SampleInfo, TextChunk


def text_batch(
    items: Sequence[Demonstration | Preference], chunks: int
) -> tuple[tuple[SampleInfo, ...], tuple[TextChunk, ...]]:
    """Divides demonstrations or preferences into at most `chunks` chunks of about equally many items.

    The responses of a preference are neighbouring rows of a chunk, the best first. A row's id is `key/n`, or `key/n/i`
    for response i of a preference, where n counts the item's occurrences in the batch from 0.

    Returns:
        The samples, one per row in order, and the chunks.
    """
    seen: Counter[str] = Counter()
    samples: list[SampleInfo] = []
    made: list[TextChunk] = []
    for part in divided(items, min(chunks, len(items))):
        rows: list[tuple[str, Demonstration | Preference, Ids]] = []
        for item in part:
            name = f"{item.key}/{seen[item.key]}"
            seen[item.key] += 1
            if isinstance(item, Demonstration):
                rows.append((name, item, item.response_ids))
            else:
                rows += [(f"{name}/{index}", item, response) for index, response in enumerate(item.responses)]
        samples += [
            SampleInfo(
                sample_id=sample_id,
                prompt_id=item.key,
                chunk=len(made),
                row=index,
                prompt_tokens=len(item.prompt_ids),
                response_tokens=len(response),
                finished=True,
            )
            for index, (sample_id, item, response) in enumerate(rows)
        ]
        margins = [item.margin for _, item, _ in rows if isinstance(item, Preference) and item.margin is not None]
        made.append(
            TextChunk(
                sample_ids=tuple(sample_id for sample_id, _, _ in rows),
                prompt_ids=Ragged.from_rows([item.prompt_ids for _, item, _ in rows], np.int32),
                response_ids=Ragged.from_rows([response for _, _, response in rows], np.int32),
                margins=np.array(margins, dtype=np.float32) if len(margins) == len(rows) else None,
            )
        )
    return tuple(samples), tuple(made)


def on_all_tokens(samples: Sequence[SampleInfo]) -> list[SampleInfo]:
    """Returns the rows with all tokens but the first as response, for losses on prompt and response."""
    return [replace(sample, prompt_tokens=1, response_tokens=sample.tokens - 1, given_tokens=0) for sample in samples]
