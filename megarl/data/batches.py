"""The rows of a step as chunks, which the ranks read, and what the driver knows of them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megarl.data.demonstrations import Demonstration
from megarl.data.pairs import Pair
from megarl.types import Ragged, SampleInfo, TextChunk


def text_batch(
    items: Sequence[Demonstration] | Sequence[Pair], chunks: int
) -> tuple[tuple[SampleInfo, ...], tuple[TextChunk, ...]]:
    """Divides demonstrations or preference pairs into chunks of about as many items each.

    A pair makes two rows of one chunk, 2i the chosen and 2i + 1 the rejected response. A row's id is ``key/n``, of a
    pair's ``key/n/chosen`` and ``key/n/rejected``, where n counts from 0 how often the item comes in the batch.

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
            )
        )
    return tuple(samples), tuple(made)


class _Row(NamedTuple):
    key: str
    sample_id: str
    prompt_ids: npt.NDArray[np.int32]
    response_ids: npt.NDArray[np.int32]


def _rows(item: Demonstration | Pair, occurrence: int) -> list[_Row]:
    name = f"{item.key}/{occurrence}"
    if isinstance(item, Demonstration):
        return [_Row(item.key, name, item.prompt_ids, item.response_ids)]
    return [
        _Row(item.key, f"{name}/chosen", item.prompt_ids, item.chosen_ids),
        _Row(item.key, f"{name}/rejected", item.prompt_ids, item.rejected_ids),
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
