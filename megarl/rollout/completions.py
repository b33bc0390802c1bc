"""Completions as rollout chunks: packed, selected and truncated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megarl.data.packing import Chunks, sample_infos
from megarl.files import sync, write_errors
from megarl.types import Ragged, RolloutChunk, SampleInfo, SampleRequest, VersionSpan, WorkItem

Ends = tuple[list[int], list[int], list[bool]]
"""The numbers of sampled and of given tokens of each response of a chunk, and whether it is finished."""


@dataclass(frozen=True, kw_only=True)
class Response:
    """A generated response, with its given tokens if there are any; see ``RolloutChunk``."""

    request: SampleRequest
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finished: bool
    versions: tuple[VersionSpan, ...]
    loss_mask: Sequence[bool] | None = None


class PendingChunk:
    """The responses to a work item that have arrived; `chunk` gets the whole chunk, by its index, with its samples."""

    def __init__(self, item: WorkItem) -> None:
        self.item = item
        self.chunk: Future[tuple[dict[int, RolloutChunk], list[SampleInfo]]] = Future()
        self._rows: dict[int, Response] = {}

    def add(self, row: int, response: Response) -> None:
        """Adds the response to a request of the item."""
        self._rows[row] = response
        if len(self._rows) == len(self.item.requests):
            infos, chunk = pack_chunk(self.item.chunk, [self._rows[row] for row in range(len(self._rows))])
            self.chunk.set_result(({self.item.chunk: chunk}, infos))


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
    masks = [(len(response.token_ids), response.loss_mask) for response in responses]
    chunk = RolloutChunk(
        sample_ids=tuple(response.request.sample_id for response in responses),
        prompt_ids=Ragged.from_rows((response.request.prompt.token_ids for response in responses), np.int32),
        response_ids=Ragged.from_rows((response.token_ids for response in responses), np.int32),
        rollout_logprobs=Ragged.from_rows((response.logprobs for response in responses), np.float32),
        finished=np.array([response.finished for response in responses], dtype=np.bool_),
        versions=tuple(response.versions for response in responses),
        loss_mask=_joined_masks(masks),
    )
    return sample_infos(index, chunk, [response.request.prompt.prompt_id for response in responses]), chunk


def _joined_masks(rows: Sequence[tuple[int, Sequence[bool] | npt.NDArray[np.bool_] | None]]) -> Ragged | None:
    """Returns the loss masks of responses, given with their lengths; None where no response has one."""
    if all(mask is None for _, mask in rows):
        return None
    return Ragged.from_rows((np.ones(length, np.bool_) if mask is None else mask for length, mask in rows), np.bool_)


_RAGGED = ("prompt_ids", "response_ids", "rollout_logprobs", "loss_mask", "turns", "turn_rewards")


def save_chunks(path: Path, chunks: Sequence[RolloutChunk]) -> None:
    """Writes chunks to an npz file."""
    columns: dict[str, npt.NDArray[Any]] = {}
    for index, chunk in enumerate(chunks):
        for name in _RAGGED:
            ragged: Ragged | None = getattr(chunk, name)
            if ragged is not None:
                columns[f"{index}/{name}"], columns[f"{index}/{name}/offsets"] = ragged.values, ragged.offsets
        spans = [(row, s.start, s.stop, s.version, s.engine_id) for row, of in enumerate(chunk.versions) for s in of]
        columns[f"{index}/versions"] = np.array(spans, dtype=np.int64).reshape(-1, 5)
        columns[f"{index}/sample_ids"], columns[f"{index}/finished"] = np.array(chunk.sample_ids), chunk.finished
        if chunk.rewards is not None:
            columns[f"{index}/rewards"] = chunk.rewards
    with write_errors(path):
        np.savez(path, **columns)  # pyright: ignore[reportArgumentType]
    sync(path)
    sync(path.parent)


def load_chunks(path: Path) -> list[RolloutChunk]:
    """Reads the chunks that `save_chunks` wrote."""
    with np.load(path) as stored:
        columns = dict(stored)
    chunks: list[RolloutChunk] = []
    while f"{len(chunks)}/finished" in columns:
        own = {name.partition("/")[2]: column for name, column in columns.items() if name.startswith(f"{len(chunks)}/")}
        versions: list[list[VersionSpan]] = [[] for _ in own["finished"]]
        for row, start, stop, version, engine_id in own["versions"].tolist():
            versions[row].append(VersionSpan(start=start, stop=stop, version=version, engine_id=engine_id))
        ragged = {name: Ragged(values=own[name], offsets=own[f"{name}/offsets"]) for name in _RAGGED if name in own}
        chunks.append(
            RolloutChunk(
                sample_ids=tuple(own["sample_ids"].tolist()),
                finished=own["finished"],
                versions=tuple(map(tuple, versions)),
                rewards=own.get("rewards"),
                **ragged,
            )
        )
    return chunks


def select_rows(chunks: Chunks[RolloutChunk], rows: Sequence[tuple[int, int]]) -> RolloutChunk:
    """Returns a chunk of one or more rows of others, given as (chunk, row); fetches only these chunks."""

    def column(name: str) -> Ragged:
        old: dict[int, Ragged] = {chunk: getattr(chunks[chunk], name) for chunk in {chunk for chunk, _ in rows}}
        return Ragged.from_rows((old[chunk][row] for chunk, row in rows), old[rows[0][0]].values.dtype)

    def of_turns(name: str) -> Ragged | None:
        return None if getattr(chunks[rows[0][0]], name) is None else column(name)

    def mask(chunk: RolloutChunk, row: int) -> tuple[int, npt.NDArray[np.bool_] | None]:
        return len(chunk.response_ids[row]), None if chunk.loss_mask is None else chunk.loss_mask[row]

    return RolloutChunk(
        sample_ids=tuple(chunks[chunk].sample_ids[row] for chunk, row in rows),
        prompt_ids=column("prompt_ids"),
        response_ids=column("response_ids"),
        rollout_logprobs=column("rollout_logprobs"),
        finished=np.array([chunks[chunk].finished[row] for chunk, row in rows], dtype=np.bool_),
        versions=tuple(chunks[chunk].versions[row] for chunk, row in rows),
        loss_mask=_joined_masks([mask(chunks[chunk], row) for chunk, row in rows]),
        rewards=_rewards(chunks, rows),
        turns=of_turns("turns"),
        turn_rewards=of_turns("turn_rewards"),
    )


def _rewards(chunks: Chunks[RolloutChunk], rows: Sequence[tuple[int, int]]) -> npt.NDArray[np.float32] | None:
    found = [None if (of := chunks[chunk].rewards) is None else of[row] for chunk, row in rows]
    return None if found[0] is None else np.array(found, dtype=np.float32)


def ends_of(chunk: RolloutChunk) -> Ends:
    sampled = chunk.rollout_logprobs.lengths
    tokens = chunk.response_ids.lengths
    return sampled.tolist(), (tokens - sampled).tolist(), chunk.finished.tolist()


def truncate_responses(chunk: RolloutChunk, token: int, after: int) -> RolloutChunk:
    """Ends each response with its first `token` at an index of at least `after`; it is finished if it has one.

    Given tokens are not counted and end no response; those after its last sampled token are cut off. Source: the style
    and summary tasks of lm-human-preferences.
    """
    import torch  # not above: torch reads the environment that the engine sets

    from megarl.algos.reward_shaping import first_end
    from megarl.experience.padded_batch import align, response_mask

    sampled = ... if chunk.loss_mask is None else chunk.loss_mask.values
    mask = response_mask(chunk.rollout_logprobs.lengths.tolist())
    ids = align(torch.from_numpy(chunk.response_ids.values[sampled].copy()), mask)
    kept, found = first_end(ids, mask, [token], after=after)
    ends: list[int] = kept.sum(-1).tolist()
    of_ids = ends
    if chunk.loss_mask is not None:
        rows = zip(chunk.loss_mask, ends, strict=True)
        of_ids = [int(np.flatnonzero(row)[:end].max(initial=-1)) + 1 for row, end in rows]

    def cut(column: Ragged, ends: Sequence[int]) -> Ragged:
        return Ragged.from_rows((row[:end] for row, end in zip(column, ends, strict=True)), column.values.dtype)

    return replace(
        chunk,
        response_ids=cut(chunk.response_ids, of_ids),
        rollout_logprobs=cut(chunk.rollout_logprobs, ends),
        loss_mask=None if chunk.loss_mask is None else cut(chunk.loss_mask, of_ids),
        finished=found.numpy(),
        versions=tuple(
            tuple(replace(span, stop=min(span.stop, end)) for span in spans if span.start < end)
            for spans, end in zip(chunk.versions, ends, strict=True)
        ),
    )
