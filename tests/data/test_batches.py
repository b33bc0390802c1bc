"""Batches of text, against their inputs."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megarl.data.batches import on_all_tokens, text_batch
from megarl.data.packing import pack
from megarl.data.schedule import step_schedule
from megarl.data.training_texts import TrainingText
from megarl.types import Layout, SampleInfo, TextChunk


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def contents(samples: tuple[SampleInfo, ...], chunks: tuple[TextChunk, ...]) -> list[tuple[str, list[int], list[int]]]:
    """Id, prompt and response of every row, looked up as a worker does."""
    found = []
    for sample in samples:
        chunk = chunks[sample.chunk]
        prompt, response = chunk.prompt_ids[sample.row], chunk.response_ids[sample.row]
        assert chunk.sample_ids[sample.row] == sample.sample_id
        assert (len(prompt), len(response)) == (sample.prompt_tokens, sample.response_tokens)
        assert (prompt.dtype, response.dtype) == (np.int32, np.int32)
        found.append((sample.sample_id, prompt.tolist(), response.tolist()))
    return found


def test_demonstrations_by_hand() -> None:
    rows = [("a", ids(1, 2), ids(3)), ("b", ids(4), ids(5, 6)), ("a", ids(1, 2), ids(3))]
    items = [TrainingText(key=key, prompt_ids=prompt, responses=(response,)) for key, prompt, response in rows]
    samples, chunks = text_batch(items, 2)
    assert contents(samples, chunks) == [("a/0", [1, 2], [3]), ("b/0", [4], [5, 6]), ("a/1", [1, 2], [3])]
    assert [len(chunk.sample_ids) for chunk in chunks] == [1, 2]
    assert [(s.prompt_id, s.finished) for s in samples] == [("a", True), ("b", True), ("a", True)]


def test_the_responses_of_a_pair_are_adjacent() -> None:
    items = [
        TrainingText(key="x", prompt_ids=ids(1), responses=(ids(2, 3), ids(4)), margin=0.5),
        TrainingText(key="y", prompt_ids=ids(5, 6), responses=(ids(7), ids(8, 9)), margin=-2.0),
    ]
    samples, chunks = text_batch(items, 8)
    assert contents(samples, chunks) == [
        ("x/0/0", [1], [2, 3]),
        ("x/0/1", [1], [4]),
        ("y/0/0", [5, 6], [7]),
        ("y/0/1", [5, 6], [8, 9]),
    ]
    assert [(s.chunk, s.row, s.prompt_id) for s in samples] == [(0, 0, "x"), (0, 1, "x"), (1, 0, "y"), (1, 1, "y")]
    assert [chunk.margins.tolist() for chunk in chunks if chunk.margins is not None] == [[0.5, 0.5], [-2.0, -2.0]]


def test_the_loss_may_cover_every_token_but_the_first() -> None:
    rows = [("a", ids(1, 2), ids(3)), ("b", ids(4), ids(5, 6))]
    items = [TrainingText(key=key, prompt_ids=prompt, responses=(response,)) for key, prompt, response in rows]
    samples, chunks = text_batch(items, 1)
    (rank,) = step_schedule(on_all_tokens(samples), Layout(), 100).ranks
    batch = pack(rank.packs[0], chunks, rank.pack_tokens)
    assert rank.total_response_tokens == 4
    assert batch.labels.tolist() == [2, 3, 5, 6]
    assert batch.tokens[batch.source_positions].tolist() == [1, 2, 4, 5]
    assert batch.tokens[batch.last_positions].tolist() == [3, 6]
    assert chunks[0].margins is None


@given(
    st.lists(st.tuples(st.sampled_from("abc"), *[st.integers(1, 6)] * 3), min_size=1, max_size=20), st.integers(1, 9)
)
def test_preferences_of_any_size_stay_together(lengths: list[tuple[str, int, int, int]], chunks: int) -> None:
    items = [
        TrainingText(key=key, prompt_ids=ids(*range(p)), responses=(ids(*[7] * c), ids(*[8] * r)))
        for key, p, c, r in lengths
    ]
    samples, made = text_batch(items, chunks)
    assert len(made) == min(chunks, len(items))
    sizes = [len(chunk.sample_ids) // 2 for chunk in made]
    assert max(sizes) - min(sizes) <= 1
    assert len({s.sample_id for s in samples}) == 2 * len(items)
    rows = contents(samples, made)
    for (_, p, c, r), chosen, rejected in zip(lengths, rows[::2], rows[1::2], strict=True):
        assert chosen[1:] == (list(range(p)), [7] * c)
        assert rejected[1:] == (list(range(p)), [8] * r)
    schedule = step_schedule(samples, Layout(dp=2), 16, rows_per_unit=2)
    for own in (own for rank in schedule.ranks for own in rank.packs):
        for chosen, rejected in zip(own[::2], own[1::2], strict=True):
            assert made[chosen.chunk].response_ids[chosen.row][0] == 7
            assert made[rejected.chunk].response_ids[rejected.row][0] == 8
            assert chosen.prompt_tokens == rejected.prompt_tokens
