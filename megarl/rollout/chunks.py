"""Responses in the form in which rollouts move: chunks of samples, and what the driver knows of each sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megarl.data.packing import Chunks
from megarl.types import Ragged, RolloutChunk, SampleInfo, SampleRequest, VersionSpan


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
