"""Completions as rollout chunks: packed, selected and truncated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megarl.data.packing import Chunks, kept_columns, sample_infos
from megarl.files import sync, write_errors
from megarl.types import (
    AnyArray,
    BoolArray,
    Ragged,
    RolloutChunk,
    SampledTurn,
    SampleInfo,
    SampleRequest,
    VersionSpan,
    WorkItem,
)

ResponseEnds = tuple[list[int], list[int], list[bool]]
"""Numbers of sampled and given tokens of each response of a chunk, and whether the response is finished."""


@dataclass(frozen=True, kw_only=True)
class Response:
    """A generated response, with its given tokens if there are any; see ``RolloutChunk``."""

    request: SampleRequest
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finished: bool
    versions: tuple[VersionSpan, ...]
    loss_mask: Sequence[bool] | None = None
    kept_counts: Sequence[int] | AnyArray | None = None
    kept_ids: Sequence[int] | AnyArray | None = None
    routes: AnyArray | None = None


class PendingChunk:
    """The responses to a work item that have arrived; `chunk` gets the chunk by index, and its samples."""

    def __init__(self, item: WorkItem) -> None:
        self.item = item
        self.chunk: Future[tuple[dict[int, RolloutChunk], list[SampleInfo]]] = Future()
        self._rows: dict[int, Response] = {}

    def add(self, row: int, response: Response) -> None:
        """Adds the response to a request of the item."""
        self._rows[row] = response
        count = len(self.item.requests)
        if len(self._rows) == count:
            responses = [self._rows[index] for index in range(count)]
            infos, chunk = pack_chunk(self.item.chunk, responses)
            self.chunk.set_result(({self.item.chunk: chunk}, infos))


@dataclass(frozen=True, kw_only=True)
class PickRequest:
    """New chunks from rows of other chunks, of any engine: by new chunk, the (chunk, row) of each row."""

    chunks: Chunks[RolloutChunk]
    rows: Mapping[int, Sequence[tuple[int, int]]]


@dataclass(frozen=True, kw_only=True)
class TruncateRequest:
    """Chunks of any engine, of which this engine truncates `assigned`; see `truncate_responses`."""

    chunks: Chunks[RolloutChunk]
    assigned: Sequence[int]
    token: int
    after: int


def pack_chunk(index: int, responses: Sequence[Response]) -> tuple[list[SampleInfo], RolloutChunk]:
    """Returns a chunk of responses, in their order, and the SampleInfo of each."""
    prompts = [response.request.prompt for response in responses]
    response_ids = Ragged.from_rows((response.token_ids for response in responses), np.int32)
    chunk = RolloutChunk(
        sample_ids=tuple(response.request.sample_id for response in responses),
        prompt_ids=Ragged.from_rows((prompt.token_ids for prompt in prompts), np.int32),
        response_ids=response_ids,
        rollout_logprobs=Ragged.from_rows((response.logprobs for response in responses), np.float32),
        finished=np.array([response.finished for response in responses], dtype=np.bool_),
        versions=tuple(response.versions for response in responses),
        loss_mask=_join_masks([response.loss_mask for response in responses], response_ids),
        routes=_join_routes([response.routes for response in responses]),
        **kept_columns(responses),
    )
    return sample_infos(index, chunk, [prompt.prompt_id for prompt in prompts]), chunk


def _join_masks(masks: Sequence[Sequence[bool] | BoolArray | None], response_ids: Ragged) -> Ragged | None:
    """Returns the loss masks of responses; None where no response has one."""
    if all(mask is None for mask in masks):
        return None
    rows: list[Any] = []
    for mask, length in zip(masks, response_ids.lengths, strict=True):
        rows.append(np.ones(length, np.bool_) if mask is None else mask)
    return Ragged.from_rows(rows, np.bool_)


def _join_routes(routes: Sequence[AnyArray | None]) -> Ragged | None:
    """Returns the routes of responses, an empty row for one without; None where none has some."""
    rows = [row for row in routes if row is not None]
    if not rows:
        return None
    dtype = rows[0].dtype
    return Ragged.from_rows([np.empty(0, dtype) if row is None else row for row in routes], dtype)


def version_spans(spans: Iterable[Sequence[int]]) -> tuple[VersionSpan, ...]:
    """Returns spans, each given as start, stop, version and engine."""
    made: list[VersionSpan] = []
    for start, stop, version, engine_id in spans:
        made.append(VersionSpan(start=start, stop=stop, version=version, engine_id=engine_id))
    return tuple(made)


_RAGGED = (
    "prompt_ids",
    "response_ids",
    "rollout_logprobs",
    "loss_mask",
    "turns",
    "turn_rewards",
    "kept_counts",
    "kept_ids",
    "routes",
)


def save_chunks(path: Path, chunks: Sequence[RolloutChunk]) -> None:
    """Writes chunks to an npz file."""
    columns: dict[str, AnyArray] = {}
    for index, chunk in enumerate(chunks):
        for name in _RAGGED:
            ragged: Ragged | None = getattr(chunk, name)
            if ragged is not None:
                columns[f"{index}/{name}"] = ragged.values
                columns[f"{index}/{name}/offsets"] = ragged.offsets
        spans: list[tuple[int, ...]] = []
        for row, row_spans in enumerate(chunk.versions):
            for span in row_spans:
                spans.append((row, *astuple(span)))
        columns[f"{index}/versions"] = np.array(spans, dtype=np.int64).reshape(-1, 5)
        columns[f"{index}/sample_ids"] = np.array(chunk.sample_ids)
        columns[f"{index}/finished"] = chunk.finished
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
        prefix = f"{len(chunks)}/"
        finished = columns[f"{prefix}finished"]
        spans: list[list[list[int]]] = [[] for _ in finished]
        for row, *span in columns[f"{prefix}versions"].tolist():
            spans[row].append(span)
        ragged: dict[str, Any] = {}
        for name in _RAGGED:
            values = columns.get(prefix + name)
            if values is not None:
                ragged[name] = Ragged(values=values, offsets=columns[f"{prefix}{name}/offsets"])
        chunks.append(
            RolloutChunk(
                sample_ids=tuple(columns[f"{prefix}sample_ids"].tolist()),
                finished=finished,
                versions=tuple(map(version_spans, spans)),
                rewards=columns.get(f"{prefix}rewards"),
                **ragged,
            )
        )
    return chunks


def select_rows(chunks: Chunks[RolloutChunk], rows: Sequence[tuple[int, int]]) -> RolloutChunk:
    """Returns a chunk of rows of others, given as (chunk, row); fetches only these chunks."""
    indices = {chunk for chunk, _ in rows}
    fetched = {index: chunks[index] for index in indices}
    sources = [(fetched[chunk], row) for chunk, row in rows]
    first, _ = sources[0]

    columns: dict[str, Any] = {}
    for name in (*_RAGGED, "finished", "rewards"):
        values: Ragged | AnyArray | None = getattr(first, name)
        if values is None or name in ("loss_mask", "kept_counts", "kept_ids", "routes"):
            continue
        picked = [getattr(chunk, name)[row] for chunk, row in sources]
        if isinstance(values, Ragged):
            columns[name] = Ragged.from_rows(picked, values.values.dtype)
        else:
            columns[name] = np.array(picked, values.dtype)
    masks: list[BoolArray | None] = []
    for chunk, row in sources:
        masks.append(None if chunk.loss_mask is None else chunk.loss_mask[row])
    routes: list[AnyArray | None] = []
    for chunk, row in sources:
        routes.append(None if chunk.routes is None else chunk.routes[row])
    return RolloutChunk(
        routes=_join_routes(routes),
        sample_ids=tuple(chunk.sample_ids[row] for chunk, row in sources),
        versions=tuple(chunk.versions[row] for chunk, row in sources),
        loss_mask=_join_masks(masks, columns["response_ids"]),
        **kept_columns(SampledTurn.of(chunk, row) for chunk, row in sources),
        **columns,
    )


def response_ends(chunk: RolloutChunk) -> ResponseEnds:
    sampled = chunk.rollout_logprobs.lengths
    tokens = chunk.response_ids.lengths
    return sampled.tolist(), (tokens - sampled).tolist(), chunk.finished.tolist()


def truncate_responses(chunk: RolloutChunk, token: int, after: int) -> RolloutChunk:
    """Ends each response with its first `token` at an index of at least `after`; it is finished if it has one.

    Given tokens are not counted and end no response; those after its last sampled token are cut
    off. Source: the style and summary tasks of lm-human-preferences.
    """
    import torch  # not above: torch reads the environment that the engine sets

    from megarl.algos.reward_shaping import first_end
    from megarl.experience.padded_batch import align, response_mask

    sampled = chunk.response_ids.values
    if chunk.loss_mask is not None:
        sampled = sampled[chunk.loss_mask.values]
    mask = response_mask(chunk.rollout_logprobs.lengths.tolist())
    ids = align(torch.from_numpy(sampled.copy()), mask)
    kept, found = first_end(ids, mask, [token], after=after)
    ends: list[int] = kept.sum(-1).tolist()  # numbers of sampled tokens
    stops = ends  # numbers of tokens
    loss_mask = chunk.loss_mask
    if loss_mask is not None:
        stops = []
        for row, end in zip(loss_mask, ends, strict=True):
            stops.append(int(np.flatnonzero(row)[:end].max(initial=-1)) + 1)
        loss_mask = _cut(loss_mask, stops)
    versions: list[tuple[VersionSpan, ...]] = []
    for spans, end in zip(chunk.versions, ends, strict=True):
        left = [span for span in spans if span.start < end]
        versions.append(tuple(replace(span, stop=min(span.stop, end)) for span in left))
    kept_counts = chunk.kept_counts
    kept_ids = chunk.kept_ids
    if kept_counts is not None and kept_ids is not None:
        kept_counts = _cut(kept_counts, ends)
        sums = np.concatenate([[0], np.cumsum(kept_counts.values)])
        kept_ids = _cut(kept_ids, np.diff(sums[kept_counts.offsets]).tolist())
    routes = chunk.routes
    if routes is not None:
        positions: list[int] = []
        lengths = np.add(chunk.prompt_ids.lengths, chunk.response_ids.lengths)
        for prompt, length, end, row in zip(chunk.prompt_ids, lengths, stops, routes, strict=True):
            of_position = len(row) // max(int(length) - 1, 1)
            positions.append(of_position * max(len(prompt) + end - 1, 0))
        routes = _cut(routes, positions)
    return replace(
        chunk,
        routes=routes,
        kept_counts=kept_counts,
        kept_ids=kept_ids,
        response_ids=_cut(chunk.response_ids, stops),
        rollout_logprobs=_cut(chunk.rollout_logprobs, ends),
        loss_mask=loss_mask,
        finished=found.numpy(),
        versions=tuple(versions),
    )


def _cut(column: Ragged, ends: Sequence[int]) -> Ragged:
    rows = [row[:end] for row, end in zip(column, ends, strict=True)]
    return Ragged.from_rows(rows, column.values.dtype)
