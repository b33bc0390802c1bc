"""The order of a stream, and its resumption."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.data.stream import Stream, stable_hash
from megarl.types import Prompt


def items_of(count: int) -> list[Prompt]:
    return [Prompt(prompt_id=f"p{i}", token_ids=()) for i in range(count)]


@given(st.integers(1, 9), st.lists(st.integers(0, 12), min_size=1, max_size=8), st.integers(0, 5))
def test_every_epoch_has_every_prompt_once_for_any_batch_size(count: int, reads: list[int], seed: int) -> None:
    items = items_of(count)
    stream, whole = Stream(items, seed), Stream(items[::-1], seed)
    got = [p for n in reads for p in stream.next(n)]
    assert len(got) == sum(reads)
    assert got == whole.next(sum(reads)), "the order depends on neither the reads nor the order of the file"
    for start in range(0, len(got) - count + 1, count):
        assert {p.key for p in got[start : start + count]} == {p.key for p in items}


def test_epochs_and_seeds_have_different_orders() -> None:
    stream = Stream(items_of(16), 0)
    orders = [stream.next(16), stream.next(16), Stream(items_of(16), 1).next(16)]
    assert orders[0] != orders[1] != orders[2] != orders[0]


@given(st.integers(1, 9), st.integers(0, 30), st.integers(0, 30))
def test_a_resumed_stream_continues(count: int, before: int, after: int) -> None:
    stream = Stream(items_of(count), 3)
    stream.next(before)
    resumed = Stream(items_of(count), 3)
    resumed.load(stream.state())
    assert resumed.next(after) == stream.next(after)
    assert resumed.state() == stream.state()


def test_a_stream_refuses_the_state_of_another_stream() -> None:
    stream = Stream(items_of(3), 0)
    edited = [*items_of(2), Prompt(prompt_id="p2", token_ids=(1,))]
    for other in (Stream(items_of(4), 0), Stream(items_of(3), 1), Stream(edited, 0)):
        with pytest.raises(ValueError, match="not those of the saved stream"):
            other.load(stream.state())
    for items in (items_of(2) * 2, []):
        with pytest.raises(AssertionError, match="unique keys"):
            Stream(items, 0)


def test_orders_and_states_are_the_same_in_every_version() -> None:
    assert stable_hash(1, "a", 2) == 2144343277050353205
    stream = Stream([Prompt(prompt_id=str(i), token_ids=(i,)) for i in range(7)], 4)
    stream.next(5)
    assert stream.state() == {"epoch": 0, "position": 5, "digest": 6346925290440417192}
    assert [prompt.key for prompt in stream.next(9)] == ["6", "0", "0", "6", "4", "3", "2", "5", "1"]
