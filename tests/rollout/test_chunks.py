"""Packing responses into chunks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from megarl.data.packing import sample_infos
from megarl.rollout.completions import (
    Response,
    load_chunks,
    pack_chunk,
    save_chunks,
    select_rows,
    truncate_responses,
)
from megarl.types import Prompt, RolloutChunk, SampleInfo, SampleRequest, VersionSpan


def response(name: str, prompt: tuple[int, ...], tokens: list[int], *, finished: bool) -> Response:
    request = SampleRequest(sample_id=name, prompt=Prompt(prompt_id=f"of {name}", token_ids=prompt), seed=0)
    span = VersionSpan(start=0, stop=len(tokens), version=4, engine_id=0)
    return Response(
        request=request, token_ids=tokens, logprobs=[-0.5 * t for t in tokens], finished=finished, versions=(span,)
    )


def columns(chunk: RolloutChunk) -> tuple[object, ...]:
    """The rows of a chunk by column."""
    ragged = (chunk.prompt_ids, chunk.response_ids, chunk.rollout_logprobs)
    assert [column.values.dtype for column in ragged] == [np.int32, np.int32, np.float32]
    rows = ([row.tolist() for row in column] for column in ragged)
    return chunk.sample_ids, *rows, chunk.finished.tolist(), chunk.versions


def test_samples_are_at_the_place_in_their_info_and_are_gathered_from_there() -> None:
    a, b = response("a", (1, 2), [3], finished=True), response("b", (4,), [5, 6], finished=False)
    c = response("c", (7, 8, 9), [8, 8, 8], finished=True)
    infos, chunk = pack_chunk(3, [a, b])
    assert infos == [
        SampleInfo(sample_id="a", prompt_id="of a", chunk=3, row=0, prompt_tokens=2, response_tokens=1, finished=True),
        SampleInfo(sample_id="b", prompt_id="of b", chunk=3, row=1, prompt_tokens=1, response_tokens=2, finished=False),
    ]
    logprobs_b = [-2.5, -3.0]
    versions = (a.versions, b.versions)
    expected = (("a", "b"), [[1, 2], [4]], [[3], [5, 6]], [[-1.5], logprobs_b], [True, False], versions)
    assert columns(chunk) == expected
    picked = select_rows({3: chunk, 5: pack_chunk(5, [c])[1]}, [(5, 0), (3, 1)])
    versions = (c.versions, b.versions)
    expected = (("c", "b"), [[7, 8, 9], [4]], [[8, 8, 8], [5, 6]], [[-4.0] * 3, logprobs_b], [True, False], versions)
    assert columns(picked) == expected


def test_a_response_is_truncated_at_the_first_such_token_after_a_minimum_length() -> None:
    """Token 13 from index 1 on: after an earlier one, at the end, only before index 1, never."""
    responses = [[13, 5, 13, 13, 6], [5, 6, 13], [13, 5], [5]]
    _, whole = pack_chunk(
        0, [response(str(index), (1,), ids, finished=index == 3) for index, ids in enumerate(responses)]
    )
    chunk = truncate_responses(whole, 13, 1)
    assert [row.tolist() for row in chunk.response_ids] == [[13, 5, 13], [5, 6, 13], [13, 5], [5]]
    assert [row.tolist() for row in chunk.rollout_logprobs] == [
        [-6.5, -2.5, -6.5],
        [-2.5, -3, -6.5],
        [-6.5, -2.5],
        [-2.5],
    ]
    assert chunk.finished.tolist() == [True, True, False, False]
    assert [[(span.start, span.stop) for span in spans] for spans in chunk.versions] == [
        [(0, 3)],
        [(0, 3)],
        [(0, 2)],
        [(0, 1)],
    ]
    assert chunk.prompt_ids is whole.prompt_ids


def test_recorded_experts_are_cut_selected_and_stored_with_their_samples(tmp_path: Path) -> None:
    """Two experts of one layer for each position but the last."""
    rows: list[Response] = []
    for name, prompt, tokens in (("a", (1, 2), [3, 13, 4]), ("b", (1,), [5])):
        positions = len(prompt) + len(tokens) - 1
        routes = np.arange(2 * positions, dtype=np.uint8)
        rows.append(replace(response(name, prompt, tokens, finished=True), routes=routes))
    _, whole = pack_chunk(0, rows)
    cut = truncate_responses(whole, 13, 1).routes
    assert cut is not None
    assert [row.tolist() for row in cut] == [[0, 1, 2, 3, 4, 5], [0, 1]]
    save_chunks(tmp_path / "step-1.npz", [whole])
    (stored,) = load_chunks(tmp_path / "step-1.npz")
    selected = select_rows({0: stored}, [(0, 1), (0, 0)]).routes
    assert selected is not None
    assert selected.values.dtype == np.uint8
    assert [row.tolist() for row in selected] == [[0, 1], [0, 1, 2, 3, 4, 5, 6, 7]]


def test_chunks_round_trip_through_a_file_bit_for_bit(tmp_path: Path) -> None:
    """More than ten of them, of one to three rows; spans of several versions and engines; any text as an id."""
    chunks = []
    for index in range(12):
        rows = [
            response(f"{index}/ä b\n/{row}", (*range(row, index + 2),), [7] * row, finished=row == 1)
            for row in (1, 2, 3)
        ]
        spans = tuple(VersionSpan(start=i, stop=i + 1, version=index + i, engine_id=2**40 * i) for i in range(3))
        rows[2] = replace(rows[2], logprobs=[-0.0, -1e-45, -np.pi], versions=spans)
        chunks.append(pack_chunk(index, rows[index % 3 :]))
    save_chunks(tmp_path / "step-3.npz", [chunk for _, chunk in chunks])
    loaded = load_chunks(tmp_path / "step-3.npz")
    assert len(loaded) == 12
    for index, (got, (infos, chunk)) in enumerate(zip(loaded, chunks, strict=True)):
        assert (got.sample_ids, got.versions) == (chunk.sample_ids, chunk.versions)
        assert sample_infos(index, got, [info.prompt_id for info in infos]) == infos
        for name in ("prompt_ids", "response_ids", "rollout_logprobs"):
            ours, theirs = getattr(got, name), getattr(chunk, name)
            assert (ours.values.dtype, ours.offsets.dtype) == (theirs.values.dtype, theirs.offsets.dtype)
            assert ours.values.tobytes() == theirs.values.tobytes()
            assert ours.offsets.tolist() == theirs.offsets.tolist()
        assert (got.finished.dtype, got.finished.tolist()) == (np.bool_, chunk.finished.tolist())


GIVEN = [False, True, True, False, True, False]
"""Of which the sampled tokens are 5, 13 and 6."""


def conversation(name: str) -> Response:
    """A response with given tokens, some of which are 13."""
    sampled = response(name, (1, 2), [5, 13, 6], finished=True)
    spans = tuple(VersionSpan(start=i, stop=i + 1, version=i, engine_id=0) for i in range(3))
    return replace(sampled, token_ids=[13, 5, 13, 13, 6, 8], loss_mask=GIVEN, versions=spans)


def test_a_conversation_has_one_value_per_sampled_token(tmp_path: Path) -> None:
    """Packed with a response of one turn, stored, and selected with one of another chunk."""
    infos, chunk = pack_chunk(0, [response("a", (1,), [3, 4], finished=True), conversation("b")])
    assert [(info.response_tokens, info.given_tokens, info.tokens) for info in infos] == [(2, 0, 3), (3, 3, 8)]
    save_chunks(tmp_path / "step-1.npz", [chunk, pack_chunk(1, [response("c", (7,), [8], finished=True)])[1]])
    stored = load_chunks(tmp_path / "step-1.npz")
    assert stored[1].loss_mask is None
    for found, rows in ((chunk, [0, 1]), (stored[0], [0, 1]), (select_rows(stored, [(1, 0), (0, 1)]), [2, 1])):
        assert found.loss_mask is not None
        assert found.loss_mask.values.dtype == np.bool_
        assert [mask.tolist() for mask in found.loss_mask] == [[[True] * 2, GIVEN, [True]][row] for row in rows]
        assert found.rollout_logprobs[1].tolist() == [-2.5, -6.5, -3.0]
        assert found.response_ids[1].tolist() == [13, 5, 13, 13, 6, 8]
        assert sample_infos(0, found, ["of a", "of b"])[1] == infos[1]
    assert select_rows(stored, [(1, 0)]).loss_mask is None


def test_given_tokens_end_no_response() -> None:
    whole = pack_chunk(0, [conversation("a")])[1]
    for after, kept, finished in ((0, 3, True), (1, 3, True), (2, 5, False)):
        cut = truncate_responses(whole, 13, after)
        assert cut.response_ids[0].tolist() == [13, 5, 13, 13, 6, 8][:kept]
        assert cut.loss_mask is not None
        assert cut.loss_mask[0].tolist() == GIVEN[:kept]
        assert cut.rollout_logprobs[0].tolist() == [-2.5, -6.5, -3.0][: sum(GIVEN[:kept])]
        assert [span.stop for span in cut.versions[0]] == list(range(1, sum(GIVEN[:kept]) + 1))
        assert cut.finished.tolist() == [finished]


def test_an_empty_list_of_chunks_round_trips(tmp_path: Path) -> None:
    save_chunks(tmp_path / "none.npz", [])
    assert load_chunks(tmp_path / "none.npz") == []


def kept(chunk: RolloutChunk) -> list[tuple[list[int], list[int]]]:
    """The counts and the ids of each row."""
    assert chunk.kept_counts is not None
    assert chunk.kept_ids is not None
    pairs = zip(chunk.kept_counts, chunk.kept_ids, strict=True)
    return [(counts.tolist(), ids.tolist()) for counts, ids in pairs]


def test_ids_of_which_tokens_were_sampled_go_with_them(tmp_path: Path) -> None:
    """One row has no token, as a conversation without a turn."""
    long = replace(response("a", (1,), [13, 5, 13], finished=False), kept_counts=[2, 0, 1], kept_ids=[13, 4, 13])
    short = replace(response("b", (1,), [7], finished=True), kept_counts=[3], kept_ids=[6, 7, 8])
    empty = response("c", (1,), [], finished=False)
    _, chunk = pack_chunk(0, [long, empty, short])
    rows = [([2, 0, 1], [13, 4, 13]), ([], []), ([3], [6, 7, 8])]
    assert kept(chunk) == rows
    save_chunks(tmp_path / "chunks.npz", [chunk])
    assert kept(load_chunks(tmp_path / "chunks.npz")[0]) == rows
    assert kept(select_rows({0: pack_chunk(0, [empty])[1], 1: chunk}, [(0, 0), (1, 2), (1, 0)])) == [
        rows[1],
        rows[2],
        rows[0],
    ]
    assert kept(truncate_responses(chunk, 5, 0)) == [([2, 0], [13, 4]), *rows[1:]]
    assert pack_chunk(0, [empty])[1].kept_counts is None
