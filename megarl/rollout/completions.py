"""Completions as rollout chunks: packed, selected and truncated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megarl.data.packing import Chunks
from megarl.types import Ragged, RolloutChunk, SampleInfo, SampleRequest, VersionSpan


@dataclass(frozen=True, kw_only=True)
class Response:
    """A generated response of R tokens; see ``RolloutChunk``."""

    request: SampleRequest
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finished: bool
    versions: tuple[VersionSpan, ...]


@dataclass(frozen=True, kw_only=True)
class PickRequest:
    """Chunks to make of rows of other chunks, of any engine: the (chunk, row) of each row, by new chunk."""

    chunks: Chunks[RolloutChunk]
    rows: Mapping[int, Sequence[tuple[int, int]]]


@dataclass(frozen=True, kw_only=True)
class TruncateRequest:
    """Chunks of any engine to truncate, `own` of them by this engine; see `truncate_responses`."""

    chunks: Chunks[RolloutChunk]
    own: Sequence[int]
    token: int
    after: int


def pack_chunk(index: int, responses: Sequence[Response]) -> tuple[list[SampleInfo], RolloutChunk]:
    """Returns a chunk of responses, in their order, and the SampleInfo of each."""
    infos = [
        SampleInfo(
            sample_id=response.request.sample_id,
            prompt_id=response.request.prompt.prompt_id,
            chunk=index,
            row=row,
            prompt_tokens=len(response.request.prompt.token_ids),
            response_tokens=len(response.token_ids),
            finished=response.finished,
        )
        for row, response in enumerate(responses)
    ]
    chunk = RolloutChunk(
        sample_ids=tuple(response.request.sample_id for response in responses),
        prompt_ids=Ragged.from_rows((response.request.prompt.token_ids for response in responses), np.int32),
        response_ids=Ragged.from_rows((response.token_ids for response in responses), np.int32),
        rollout_logprobs=Ragged.from_rows((response.logprobs for response in responses), np.float32),
        finished=np.array([response.finished for response in responses], dtype=np.bool_),
        versions=tuple(response.versions for response in responses),
    )
    return infos, chunk


def select_rows(chunks: Chunks[RolloutChunk], rows: Sequence[tuple[int, int]]) -> RolloutChunk:
    """Returns a chunk of one or more rows of others, given as (chunk, row); fetches only these chunks."""

    def column(name: str) -> Ragged:
        old: dict[int, Ragged] = {chunk: getattr(chunks[chunk], name) for chunk in {chunk for chunk, _ in rows}}
        return Ragged.from_rows((old[chunk][row] for chunk, row in rows), old[rows[0][0]].values.dtype)

    return RolloutChunk(
        sample_ids=tuple(chunks[chunk].sample_ids[row] for chunk, row in rows),
        prompt_ids=column("prompt_ids"),
        response_ids=column("response_ids"),
        rollout_logprobs=column("rollout_logprobs"),
        finished=np.array([chunks[chunk].finished[row] for chunk, row in rows], dtype=np.bool_),
        versions=tuple(chunks[chunk].versions[row] for chunk, row in rows),
    )


def truncate_responses(chunk: RolloutChunk, token: int, after: int) -> RolloutChunk:
    """Ends each response with its first `token` at an index of at least `after`; it is finished if it has one.

    Source: the style and summary tasks of lm-human-preferences.
    """
    import torch  # not above: torch reads the environment that the engine sets

    from megarl.algos.reward_shaping import first_end
    from megarl.experience.padded_batch import align, response_mask

    mask = response_mask(chunk.response_ids.lengths.tolist())
    ids = align(torch.from_numpy(chunk.response_ids.values.copy()), mask)
    kept, found = first_end(ids, mask, [token], after=after)
    ends: list[int] = kept.sum(-1).tolist()

    def cut(column: Ragged) -> Ragged:
        return Ragged.from_rows((row[:end] for row, end in zip(column, ends, strict=True)), column.values.dtype)

    return replace(
        chunk,
        response_ids=cut(chunk.response_ids),
        rollout_logprobs=cut(chunk.rollout_logprobs),
        finished=found.numpy(),
        versions=tuple(
            tuple(replace(span, stop=min(span.stop, end)) for span in spans if span.start < end)
            for spans, end in zip(chunk.versions, ends, strict=True)
        ),
    )
