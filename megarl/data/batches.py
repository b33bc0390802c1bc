"""A step of demonstrations or preferences as chunks for the ranks."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megarl.data.demonstrations import Demonstration
from megarl.data.preferences import Preference
from megarl.types import Ragged, SampleInfo, TextChunk


def text_batch(
    items: Sequence[Demonstration] | Sequence[Preference], chunks: int
) -> tuple[tuple[SampleInfo, ...], tuple[TextChunk, ...]]:
    """Divides demonstrations or preferences into at most ``chunks`` chunks of about equally many items.

    A preference makes neighbouring rows of one chunk, the best response first. A row's id is ``key/n``, or ``key/n/i``
    for response i of a preference, where n counts the item's occurrences in the batch from 0.

    Returns:
        The samples, one per row in order, and the chunks.
    """
    seen: Counter[str] = Counter()
    samples: list[SampleInfo] = []
    made: list[TextChunk] = []
    count = min(chunks, len(items))
    bounds = [len(items) * i // count for i in range(count + 1)]
    for start, stop in itertools.pairwise(bounds):
        rows: list[_TextRow] = []
        for item in items[start:stop]:
            rows += _rows(item, seen[item.key])
            seen[item.key] += 1
        samples += [
            SampleInfo(
                sample_id=row.sample_id,
                prompt_id=row.key,
                chunk=len(made),
                row=index,
                prompt_tokens=len(row.prompt_ids),
                response_tokens=len(row.response_ids),
                finished=True,
            )
            for index, row in enumerate(rows)
        ]
        made.append(
            TextChunk(
                sample_ids=tuple(row.sample_id for row in rows),
                prompt_ids=Ragged.from_rows([row.prompt_ids for row in rows], np.int32),
                response_ids=Ragged.from_rows([row.response_ids for row in rows], np.int32),
                margins=_margins(rows),
            )
        )
    return tuple(samples), tuple(made)


def on_all_tokens(samples: Sequence[SampleInfo]) -> list[SampleInfo]:
    """Returns the rows with all tokens but the first counted as response, for losses on prompt and response."""
    return [replace(sample, prompt_tokens=1, response_tokens=sample.tokens - 1) for sample in samples]


class _TextRow(NamedTuple):
    key: str
    sample_id: str
    prompt_ids: npt.NDArray[np.int32]
    response_ids: npt.NDArray[np.int32]
    margin: float | None


def _margins(rows: Sequence[_TextRow]) -> npt.NDArray[np.float32] | None:
    margins = [row.margin for row in rows if row.margin is not None]
    return np.array(margins, dtype=np.float32) if len(margins) == len(rows) else None


def _rows(item: Demonstration | Preference, occurrence: int) -> list[_TextRow]:
    name = f"{item.key}/{occurrence}"
    if isinstance(item, Demonstration):
        return [_TextRow(item.key, name, item.prompt_ids, item.response_ids, None)]
    return [
        _TextRow(item.key, f"{name}/{index}", item.prompt_ids, response, item.margin)
        for index, response in enumerate(item.responses)
    ]
