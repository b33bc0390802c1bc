"""Responses that end at a token, for whoever scores them. Imports torch, which an engine does not before it starts."""

from __future__ import annotations

from dataclasses import replace

import torch

from megarl.algos.sequences import first_end
from megarl.data.alignment import align, response_mask
from megarl.types import Ragged, RolloutChunk


def truncated(chunk: RolloutChunk, token: int, after: int) -> RolloutChunk:
    """Ends every response with its first ``token`` at an index of at least ``after``; where it has one, it is finished.

    Source: the style and summary tasks of lm-human-preferences, whose reward model reads no further.
    """
    mask = response_mask(chunk.response_ids.lengths.tolist())
    ids = align(torch.from_numpy(chunk.response_ids.values.copy()), mask)
    kept = first_end(ids, mask, [token], after=after)
    ends: list[int] = kept.lengths.tolist()

    def cut(column: Ragged) -> Ragged:
        return Ragged.from_rows((row[:end] for row, end in zip(column, ends, strict=True)), column.values.dtype)

    return replace(
        chunk,
        response_ids=cut(chunk.response_ids),
        rollout_logprobs=cut(chunk.rollout_logprobs),
        finished=kept.found.numpy(),
        versions=tuple(
            tuple(replace(span, stop=min(span.stop, end)) for span in spans if span.start < end)
            for spans, end in zip(chunk.versions, ends, strict=True)
        ),
    )
