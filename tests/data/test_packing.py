"""Packing against a hand-made pack and a naive loop."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.data.packing import PAD_SEQUENCE_TOKENS, gather, pack, pack_shape, scatter, scatter_scalars
from megarl.experience.padded_batch import align, flatten, response_mask
from megarl.types import PackRow, Ragged


@dataclass(frozen=True)
class Tokens:
    prompt_ids: Ragged
    response_ids: Ragged
    loss_mask: Ragged | None = None
    kept_counts: Ragged | None = None
    kept_ids: Ragged | None = None
    routes: Ragged | None = None


def make_chunks(lengths: list[list[tuple[int, int]]]) -> tuple[dict[int, Tokens], list[PackRow]]:
    """Chunks with distinct tokens, and their rows in order."""
    fresh = iter(range(1, 100_000))
    chunks: dict[int, Tokens] = {}
    rows: list[PackRow] = []
    for index, chunk in enumerate(lengths):
        prompts = [[next(fresh) for _ in range(p)] for p, _ in chunk]
        responses = [[next(fresh) for _ in range(r)] for _, r in chunk]
        chunks[index] = Tokens(Ragged.from_rows(prompts, np.int32), Ragged.from_rows(responses, np.int32))
        rows += [PackRow(chunk=index, row=i, prompt_tokens=p, response_tokens=r) for i, (p, r) in enumerate(chunk)]
    return chunks, rows


lengths = st.lists(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=4), min_size=1, max_size=4
)


def test_a_conversation_by_hand() -> None:
    """Given tokens are in the sequence, and nothing is predicted of them."""
    responses = Ragged.from_rows([[31, 21, 22, 32, 33, 23, 34], [24, 25]], np.int32)
    mask = Ragged.from_rows([[0, 1, 1, 0, 0, 1, 0], [1, 1]], np.bool_)
    chunks = {4: Tokens(Ragged.from_rows([[11, 12], [13]], np.int32), responses, mask)}
    rows = [
        PackRow(chunk=4, row=0, prompt_tokens=2, response_tokens=3, given_tokens=4),
        PackRow(chunk=4, row=1, prompt_tokens=1, response_tokens=2),
    ]
    batch = pack(rows, chunks, 12)
    assert batch.tokens.tolist() == [11, 12, 31, 21, 22, 32, 33, 23, 34, 13, 24, 25]
    assert batch.shape.cu_seqlens.tolist() == [0, 9, 12]
    assert (batch.shape.cu_seqlens.dtype, batch.labels.dtype) == (np.int32, np.int64)
    assert batch.source_positions.tolist() == [2, 3, 6, 9, 10]
    assert batch.labels.tolist() == [21, 22, 23, 24, 25]
    assert batch.last_positions.tolist() == [8, 11]
    assert batch.response_lengths.tolist() == [3, 2]
    wrong = PackRow(chunk=4, row=0, prompt_tokens=2, response_tokens=4, given_tokens=3)
    with pytest.raises(AssertionError, match="the loss mask of PackRow"):
        pack([wrong], chunks, 12)


def test_the_ids_of_which_tokens_were_sampled_by_hand() -> None:
    """The token itself comes first; one was sampled of too many."""
    tokens = Ragged.from_rows([[11], [13]], np.int32), Ragged.from_rows([[21, 22], [23]], np.int32)
    counts = Ragged.from_rows([[3, 0], [1]], np.int32)
    chunk = Tokens(*tokens, kept_counts=counts, kept_ids=Ragged.from_rows([[5, 21, 9], [23]], np.int32))
    rows = [PackRow(chunk=0, row=i, prompt_tokens=1, response_tokens=2 - i) for i in (1, 0)]
    kept = pack(rows, {0: chunk}, 5).kept
    assert kept is not None
    assert kept.tolist() == [[23, -1, -1], [21, 5, 9], [22, -1, -1]]
    assert pack(rows, {0: Tokens(*tokens)}, 5).kept is None


def test_a_pack_without_rows_is_padding() -> None:
    batch = pack([], {}, 4)
    assert batch.tokens.tolist() == [0, 0, 0, 0]
    assert batch.shape.cu_seqlens.tolist() == [0, 4]
    assert batch.source_positions.tolist() == batch.labels.tolist() == batch.last_positions.tolist() == []


def test_padding_consists_of_short_sequences() -> None:
    assert PAD_SEQUENCE_TOKENS == 64
    filler = pack_shape([], 200)
    assert (filler.cu_seqlens.tolist(), filler.max_seqlen) == ([0, 64, 128, 192, 200], 64)
    row = PackRow(chunk=0, row=0, prompt_tokens=2, response_tokens=3)
    after_a_short_row = pack_shape([row], 5 + 2 * 64)
    assert (after_a_short_row.cu_seqlens.tolist(), after_a_short_row.max_seqlen) == ([0, 5, 69, 133], 64)
    assert (pack_shape([row], 5).cu_seqlens.tolist(), pack_shape([row], 5).max_seqlen) == ([0, 5], 5)


@given(st.lists(st.integers(1, 150), max_size=4), st.integers(0, 300))
def test_sequence_bounds_cover_the_pack_and_max_length_is_exact(prompts: list[int], padding: int) -> None:
    """Megatron's RoPE treats a pack whose maximum equals its length as one sequence, whatever its bounds are."""
    rows = [PackRow(chunk=0, row=i, prompt_tokens=p, response_tokens=0) for i, p in enumerate(prompts)]
    pack_tokens = max(sum(prompts) + padding, 1)
    shape = pack_shape(rows, pack_tokens)
    sequences = [b - a for a, b in itertools.pairwise(shape.cu_seqlens.tolist())]
    assert shape.cu_seqlens[0] == 0
    assert sum(sequences) == pack_tokens
    assert sequences[: len(rows)] == prompts
    assert all(0 < tokens <= 64 for tokens in sequences[len(rows) :])
    assert shape.max_seqlen == max(sequences)
    assert (shape.max_seqlen == pack_tokens) == (len(sequences) == 1)


@given(lengths, st.integers(0, 150), st.randoms())
def test_response_tokens_are_gathered_at_the_predicting_position(
    lengths: list[list[tuple[int, int]]], padding: int, random: object
) -> None:
    chunks, rows = make_chunks(lengths)
    random.shuffle(rows)  # type: ignore[attr-defined]
    batch = pack(rows, chunks, sum(r.tokens for r in rows) + padding)
    assert batch.tokens[batch.source_positions + 1].tolist() == batch.labels.tolist()
    assert batch.labels.tolist() == [int(t) for r in rows for t in chunks[r.chunk].response_ids[r.row]]
    bounds = batch.shape.cu_seqlens.tolist()
    assert bounds[-1] == len(batch.tokens)
    for row, start, stop in zip(rows, bounds, bounds[1:], strict=False):
        tokens = [*chunks[row.chunk].prompt_ids[row.row], *chunks[row.chunk].response_ids[row.row]]
        assert batch.tokens[start:stop].tolist() == tokens
    assert [batch.tokens[p] for p in batch.last_positions] == [
        [*chunks[r.chunk].prompt_ids[r.row], *chunks[r.chunk].response_ids[r.row]][-1] for r in rows
    ]


@given(lengths, st.randoms())
def test_scatter_inverts_gather(lengths: list[list[tuple[int, int]]], random: object) -> None:
    _, rows = make_chunks(lengths)
    fresh = iter(range(100_000))
    column = {
        index: Ragged.from_rows([[next(fresh) for _ in range(r)] for _, r in chunk], np.float32)
        for index, chunk in enumerate(lengths)
    }
    random.shuffle(rows)  # type: ignore[attr-defined]
    back = scatter(rows, gather(rows, column))
    assert back.keys() == column.keys()
    for chunk, ragged in column.items():
        assert np.array_equal(back[chunk].values, ragged.values)
        assert np.array_equal(back[chunk].offsets, ragged.offsets)
    scalars = scatter_scalars(rows, np.array([100 * r.chunk + r.row for r in rows], dtype=np.float32))
    for index, chunk in enumerate(lengths):
        assert scalars[index].tolist() == [100 * index + i for i in range(len(chunk))]


def test_nothing_is_scattered_from_no_rows() -> None:
    assert scatter([], np.zeros(0, dtype=np.float32)) == {}
    assert gather([], {}).shape == (0,)


def test_invalid_packs_are_refused() -> None:
    chunks, rows = make_chunks([[(2, 3), (1, 1)]])
    with pytest.raises(AssertionError, match="do not fit"):
        pack_shape(rows, 6)
    wrong = PackRow(chunk=0, row=0, prompt_tokens=3, response_tokens=3)
    with pytest.raises(AssertionError, match="the tokens of PackRow"):
        pack([wrong], chunks, 9)
    wrong = PackRow(chunk=0, row=0, prompt_tokens=3, response_tokens=2)
    with pytest.raises(AssertionError, match="3 values for PackRow"):
        gather([wrong], {0: Ragged.from_rows([[1, 2, 3]], np.float32)})
    for incomplete in (rows[1:], [rows[0], rows[0]]):
        with pytest.raises(AssertionError, match="whole chunks"):
            scatter(incomplete, np.zeros(sum(row.response_tokens for row in incomplete), dtype=np.float32))


@given(st.lists(st.integers(0, 6), max_size=6))
def test_alignment_round_trips_with_gradient(lengths: list[int]) -> None:
    mask = response_mask(lengths)
    assert mask.shape == (len(lengths), max(lengths, default=0))
    assert mask.tolist() == [[t < n for t in range(max(lengths))] for n in lengths]
    flat = torch.arange(1.0, sum(lengths) + 1, dtype=torch.float64, requires_grad=True)
    aligned = align(flat, mask)
    assert torch.equal(flatten(aligned, mask), flat)
    assert not aligned[~mask].any()
    (aligned * aligned).sum().backward()
    assert flat.grad is not None
    assert torch.equal(flat.grad, 2 * flat.detach())
