"""The rows of a step as chunks, which the ranks read, and what the driver knows of them."""

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
    """Divides demonstrations or preferences into chunks of about as many items each.

    A preference makes neighbouring rows of one chunk, one per response and the best one first. A row's id is ``key/n``,
    of a preference's ``key/n/i``, where n counts from 0 how often the item comes in the batch, and i its responses.

    Args:
        items: of one step, in order.
        chunks: how many to make; fewer where there are fewer items.

    Returns:
        What the driver knows of each row, in order, and the chunks.
    """
    seen: Counter[str] = Counter()
    samples: list[SampleInfo] = []
    made: list[TextChunk] = []
    count = min(chunks, len(items))
    bounds = [len(items) * i // count for i in range(count + 1)]
    for start, stop in itertools.pairwise(bounds):
        rows: list[_Row] = []
        for item in items[start:stop]:
            rows += _rows(item, seen[item.key])
            seen[item.key] += 1
        samples += [_info(row, chunk=len(made), place=place) for place, row in enumerate(rows)]
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
    """The same rows, for a loss on every token of prompt and response but the first, which nothing predicts.

    To a schedule, the tokens that a loss counts are those of the response: here the response begins at token 1.
    """
    return [replace(sample, prompt_tokens=1, response_tokens=sample.tokens - 1) for sample in samples]


class _Row(NamedTuple):
    key: str
    sample_id: str
    prompt_ids: npt.NDArray[np.int32]
    response_ids: npt.NDArray[np.int32]
    margin: float | None


def _margins(rows: Sequence[_Row]) -> npt.NDArray[np.float32] | None:
    margins = [row.margin for row in rows if row.margin is not None]
    return np.array(margins, dtype=np.float32) if len(margins) == len(rows) else None


def _rows(item: Demonstration | Preference, occurrence: int) -> list[_Row]:
    name = f"{item.key}/{occurrence}"
    if isinstance(item, Demonstration):
        return [_Row(item.key, name, item.prompt_ids, item.response_ids, None)]
    return [
        _Row(item.key, f"{name}/{place}", item.prompt_ids, response, item.margin)
        for place, response in enumerate(item.responses)
    ]


def _info(row: _Row, *, chunk: int, place: int) -> SampleInfo:
    return SampleInfo(
        sample_id=row.sample_id,
        prompt_id=row.key,
        chunk=chunk,
        row=place,
        prompt_tokens=len(row.prompt_ids),
        response_tokens=len(row.response_ids),
        finished=True,
    )
