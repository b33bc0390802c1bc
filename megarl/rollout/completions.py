"""Completions as rollouts: chunks of samples, cut at a stop token for scoring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megarl.data.packing import Chunks
from megarl.types import Ragged, RolloutChunk, SampleInfo, SampleRequest, VersionSpan


def truncated(chunk: RolloutChunk, token: int, after: int) -> RolloutChunk:
    """Ends every response with its first ``token`` at an index of at least ``after``; where it has one, it is finished.

    Source: the style and summary tasks of lm-human-preferences, whose reward model reads no further.
    """
    import torch  # here, as an engine sets what torch reads when it is imported

    from megarl.algos.reward_shaping import first_end
    from megarl.experience.padded_batch import align, response_mask

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


@dataclass(frozen=True, kw_only=True)
class Response:
    """One generated answer.

    Args:
        token_ids: R ids, the end token included.
        logprobs: R values in nats, under the distribution that was sampled from.
        finished: an end token or a stop text ended it, not the length limit.
        versions: spans that cover it in order.
    """

    request: SampleRequest
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finished: bool
    versions: tuple[VersionSpan, ...]


def into_chunk(index: int, responses: Sequence[Response]) -> tuple[list[SampleInfo], RolloutChunk]:
    """Packs responses, in their order, into a chunk.

    Args:
        index: of the chunk.

    Returns:
        One SampleInfo per response, and the chunk.
    """
    return [_info(response, index, row) for row, response in enumerate(responses)], _chunk(responses)


def picked(chunks: Chunks[RolloutChunk], rows: Sequence[tuple[int, int]]) -> RolloutChunk:
    """A chunk of rows of others, in this order.

    Args:
        chunks: of which those of the rows are asked for.
        rows: of the new chunk, as (chunk, row); one at least.
    """

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


def _info(response: Response, chunk: int, row: int) -> SampleInfo:
    prompt = response.request.prompt
    return SampleInfo(
        sample_id=response.request.sample_id,
        prompt_id=prompt.prompt_id,
        chunk=chunk,
        row=row,
        prompt_tokens=len(prompt.token_ids),
        response_tokens=len(response.token_ids),
        finished=response.finished,
    )


def _chunk(responses: Sequence[Response]) -> RolloutChunk:
    return RolloutChunk(
        sample_ids=tuple(response.request.sample_id for response in responses),
        prompt_ids=Ragged.from_rows((response.request.prompt.token_ids for response in responses), np.int32),
        response_ids=Ragged.from_rows((response.token_ids for response in responses), np.int32),
        rollout_logprobs=Ragged.from_rows((response.logprobs for response in responses), np.float32),
        finished=np.array([response.finished for response in responses], dtype=np.bool_),
        versions=tuple(response.versions for response in responses),
    )
