"""Packs (micro-batches) as flat arrays: sequences end to end, without padding between them (THD).

A row with P prompt and R response tokens that starts at position s has prompt token i at s + i and
response token t at s + P + t. The log-probability, entropy and value of response token t are the
model's outputs at the position that predicts it, s + P + t - 1 (`source_positions`). The score of a
row is the output at its last token, s + P + R - 1 (`last_positions`). In a conversation with given
tokens, `source_positions` and all that follows from them are those of the sampled tokens
alone: this is where `loss_mask` is applied, once, so that no column has a value of a given token.

The padding at the end of a pack is short sequences, so that every position attends to something and
the lengths add up to the padded length. Its outputs are not used. A pack without rows
is all padding.

Shapes: S positions of the pack, B rows, T response tokens of all rows ("flat"), given
ones not counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megarl.errors import RunError
from megarl.types import AnyArray, FloatArray, Int32Array, Int64Array, PackRow, Ragged, RolloutChunk, SampleInfo

PAD_TOKEN_ID = 0  # any id of the vocabulary would do
PAD_SEQUENCE_TOKENS = 64
"""Length of padding sequences. Attention is quadratic in it: if all padding were one sequence, empty packs would cost
most. Very short sequences cost time where attention loops over them."""

Ids = Int64Array
Values = FloatArray


class Chunks[V](Protocol):
    """One value per chunk, by chunk index; access may fetch it."""

    def __getitem__(self, chunk: int, /) -> V: ...


class TokenChunk(Protocol):
    """The token columns of RolloutChunk and ExperienceChunk."""

    @property
    def prompt_ids(self) -> Ragged: ...

    @property
    def response_ids(self) -> Ragged: ...

    @property
    def loss_mask(self) -> Ragged | None: ...

    @property
    def kept_counts(self) -> Ragged | None: ...

    @property
    def kept_ids(self) -> Ragged | None: ...

    @property
    def routes(self) -> Ragged | None: ...


@dataclass(frozen=True, kw_only=True)
class RoutedLayers:
    """The layers of a rank whose tokens go to recorded experts.

    Args:
        layers: their numbers among the model's layers with experts.
        of: number of these.
        experts: number of experts of a token.
    """

    layers: tuple[int, ...]
    of: int
    experts: int


@dataclass(frozen=True, kw_only=True)
class PackShape:
    """The lengths of a pack's sequences, padding included; every pipeline stage needs them.

    Args:
        cu_seqlens: starts of the sequences and the end, from 0 to S, [sequences + 1] int32.
        max_seqlen: number of tokens of the longest sequence.
    """

    cu_seqlens: Int32Array
    max_seqlen: int


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """A pack with its tokens.

    Args:
        tokens: token ids, [S] int64.
        response_lengths: number of each row's response tokens, [B] int64.
        source_positions: position that predicts each response token, [T] int64.
        labels: response tokens, [T] int64.
        last_positions: position of each row's last token, [B] int64.
        kept: each response token, the other ids from which it was sampled, and -1 after them, [T, K]
            int32; None where they are not recorded. A token of too many has no others.
        routes: experts of each position, [S, layers of a rank, experts of a token], as of
            ``RolloutChunk``; None where they are not recorded, or not asked for.
    """

    shape: PackShape
    tokens: Ids
    response_lengths: Ids
    source_positions: Ids
    labels: Ids
    last_positions: Ids
    kept: Int32Array | None = None
    routes: AnyArray | None = None


def pack_shape(rows: Sequence[PackRow], pack_tokens: int) -> PackShape:
    """Returns the shape of a padded pack."""
    lengths = [row.tokens for row in rows]
    padding = pack_tokens - sum(lengths)
    assert padding >= 0, "the rows do not fit into the pack"
    while padding > 0:
        lengths.append(min(PAD_SEQUENCE_TOKENS, padding))
        padding -= PAD_SEQUENCE_TOKENS
    ends = np.cumsum(lengths)
    return PackShape(cu_seqlens=np.concatenate([[0], ends]).astype(np.int32), max_seqlen=max(lengths))


def pack(
    rows: Sequence[PackRow], chunks: Chunks[TokenChunk], pack_tokens: int, routed: RoutedLayers | None = None
) -> PackedBatch:
    """Packs the tokens of the rows; the rows say where each response begins.

    Args:
        pack_tokens: padded number of tokens, S.
        routed: the layers whose recorded experts are packed; None: none.
    """
    shape = pack_shape(rows, pack_tokens)
    tokens = np.full(pack_tokens, PAD_TOKEN_ID, dtype=np.int64)
    positions: list[Ids] = []
    for row, start in zip(rows, shape.cu_seqlens.tolist(), strict=False):
        chunk = chunks[row.chunk]
        prompt = chunk.prompt_ids[row.row]
        response = chunk.response_ids[row.row]
        assert len(prompt) + len(response) == row.tokens, f"the tokens of {row}"
        tokens[start : start + row.tokens] = np.concatenate([prompt, response])
        positions.append(start + _sampled_positions(row, chunk))
    labelled = _concatenate(positions, np.int64)
    ends = shape.cu_seqlens[1 : len(rows) + 1].astype(np.int64)
    return PackedBatch(
        shape=shape,
        tokens=tokens,
        response_lengths=np.array([row.response_tokens for row in rows], dtype=np.int64),
        source_positions=labelled - 1,
        labels=tokens[labelled],
        last_positions=ends - 1,
        kept=_kept(rows, chunks, tokens[labelled]),
        routes=None if routed is None else _routes(rows, chunks, shape, routed),
    )


def _kept(rows: Sequence[PackRow], chunks: Chunks[TokenChunk], labels: Ids) -> Int32Array | None:
    """Returns ``PackedBatch.kept``."""
    counts: list[AnyArray] = []
    ids: list[AnyArray] = []
    for row in rows:
        chunk = chunks[row.chunk]
        if chunk.kept_counts is not None and chunk.kept_ids is not None:
            counts.append(chunk.kept_counts[row.row])
            ids.append(chunk.kept_ids[row.row])
    if not counts:
        return None
    per_token = _concatenate(counts, np.int64)
    assert len(per_token) == len(labels), "all rows with sampled tokens have them, or none"
    others = _concatenate(ids, np.int32)
    token = np.repeat(np.arange(len(labels)), per_token)
    is_other = others != labels[token]
    per_token = np.bincount(token[is_other], minlength=len(labels))
    kept = np.full((len(labels), 1 + per_token.max(initial=0)), -1, dtype=np.int32)
    kept[:, 0] = labels
    kept[:, 1:][np.arange(kept.shape[1] - 1) < per_token[:, None]] = others[is_other]
    return kept


def _routes(
    rows: Sequence[PackRow], chunks: Chunks[TokenChunk], shape: PackShape, routed: RoutedLayers
) -> AnyArray | None:
    """Returns ``PackedBatch.routes``; RunError for those of another model."""
    found: AnyArray | None = None
    layers = list(routed.layers)
    for row, start in zip(rows, shape.cu_seqlens.tolist(), strict=False):
        routes = chunks[row.chunk].routes
        if routes is None or len(routes[row.row]) == 0:
            continue
        recorded = routes[row.row]
        positions = row.tokens - 1
        if len(recorded) != positions * routed.of * routed.experts:
            raise RunError(
                f"{len(recorded)} recorded experts are not those of {positions} positions of this model: "
                "replay rollouts of the same model, or set rollout.router_replay to false"
            )
        if found is None:
            none = np.iinfo(recorded.dtype).max
            every = (int(shape.cu_seqlens[-1]), len(layers), routed.experts)
            found = np.full(every, none, dtype=recorded.dtype)
        found[start : start + positions] = recorded.reshape(positions, routed.of, -1)[:, layers]
    return found


def _sampled_positions(row: PackRow, chunk: TokenChunk) -> Ids:
    """Returns where the response tokens of a row are in its sequence, without given ones."""
    if not row.given_tokens:
        return np.arange(row.prompt_tokens, row.tokens, dtype=np.int64)
    assert chunk.loss_mask is not None
    sampled = np.flatnonzero(chunk.loss_mask[row.row])
    assert len(sampled) == row.response_tokens, f"the loss mask of {row}"
    return row.prompt_tokens + sampled


def gather(rows: Iterable[PackRow], column: Chunks[Ragged]) -> Values:
    """Returns a column of the rows, [T] float32."""
    values: list[Values] = []
    for row in rows:
        value = column[row.chunk][row.row]
        assert len(value) == row.response_tokens, f"{len(value)} values for {row}"
        values.append(value)
    return _concatenate(values, np.float32)


def scatter(rows: Sequence[PackRow], flat: Values) -> dict[int, Ragged]:
    """Returns one column per chunk: the inverse of `gather` for whole chunks.

    Args:
        rows: rows of whole chunks, in any order.
        flat: values in the order of `rows`, [T] float32.
    """
    lengths = [row.response_tokens for row in rows]
    assert len(flat) == sum(lengths)
    parts = np.split(flat, np.cumsum(lengths)[:-1])
    columns: dict[int, Ragged] = {}
    for chunk, order in _row_order(rows).items():
        columns[chunk] = Ragged.from_rows([parts[index] for index in order], np.float32)
    return columns


def scatter_scalars(rows: Sequence[PackRow], values: Values) -> dict[int, Values]:
    """Returns one [N] float32 array per chunk from values per row, [B] float32; see `scatter`."""
    assert len(values) == len(rows)
    return {chunk: values[order].astype(np.float32) for chunk, order in _row_order(rows).items()}


def _row_order(rows: Sequence[PackRow]) -> dict[int, list[int]]:
    """By chunk, the indices in ``rows`` of its rows 0, 1, 2, ..."""
    order: dict[int, list[int]] = defaultdict(list)
    by_place = sorted(range(len(rows)), key=lambda index: (rows[index].chunk, rows[index].row))
    for index in by_place:
        indices = order[rows[index].chunk]
        assert rows[index].row == len(indices), "the rows are not whole chunks"
        indices.append(index)
    return order


def _concatenate(arrays: Sequence[AnyArray], dtype: npt.DTypeLike) -> AnyArray:
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype)


def sample_infos(index: int, chunk: RolloutChunk, prompt_ids: Sequence[str]) -> list[SampleInfo]:
    """Returns the SampleInfo of each row of a chunk, whose prompts are `prompt_ids`."""
    infos: list[SampleInfo] = []
    for row, sample_id in enumerate(chunk.sample_ids):
        sampled = len(chunk.rollout_logprobs[row])
        info = SampleInfo(
            sample_id=sample_id,
            prompt_id=prompt_ids[row],
            chunk=index,
            row=row,
            prompt_tokens=len(chunk.prompt_ids[row]),
            response_tokens=sampled,
            finished=bool(chunk.finished[row]),
            given_tokens=len(chunk.response_ids[row]) - sampled,
            reward=None if chunk.rewards is None else float(chunk.rewards[row]),
        )
        infos.append(info)
    return infos


class KeptRow(Protocol):
    """A row of ``kept_counts`` and ``kept_ids`` of ``RolloutChunk``; None where there are none."""

    @property
    def kept_counts(self) -> Sequence[int] | AnyArray | None: ...

    @property
    def kept_ids(self) -> Sequence[int] | AnyArray | None: ...


def kept_columns(rows: Iterable[KeptRow]) -> dict[str, Any]:
    """Returns the columns by name; none where no row has them. A row without a sampled token may lack them."""
    counts: list[Any] = []
    ids: list[Any] = []
    are_recorded = False
    for row in rows:
        are_recorded = are_recorded or row.kept_counts is not None
        counts.append(() if row.kept_counts is None else row.kept_counts)
        ids.append(() if row.kept_ids is None else row.kept_ids)
    if not are_recorded:
        return {}
    return {"kept_counts": Ragged.from_rows(counts, np.int32), "kept_ids": Ragged.from_rows(ids, np.int32)}
