"""Prompt files, random prompts, the stream and its resumption, and sample requests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.data.prompts import PromptStream, random_prompts, read_prompts, sample_requests
from megarl.types import Prompt


def prompts_of(count: int) -> list[Prompt]:
    return [Prompt(prompt_id=f"p{i}", token_ids=(i,)) for i in range(count)]


def test_rows_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"token_ids": [3, 1], "answer": "x"}\n{"prompt_id": "b", "token_ids": [0]}\n')
    assert read_prompts(path, 4) == [
        Prompt(prompt_id="1", token_ids=(3, 1), fields={"answer": "x"}),
        Prompt(prompt_id="b", token_ids=(0,)),
    ]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{", "Expecting property name"),
        ("", "Expecting value"),
        ("[1]", "must be a JSON object"),
        ('{"text": "a"}', "token_ids must be a list"),
        ('{"token_ids": []}', "token_ids must be a list"),
        ('{"token_ids": [1, 4]}', "token_ids holds 4"),
        ('{"token_ids": [-1]}', "token_ids holds -1"),
        ('{"token_ids": [true]}', "token_ids holds True"),
        ('{"token_ids": [1.0]}', "token_ids holds 1.0"),
        ('{"token_ids": [1], "prompt_id": 7}', "prompt_id is 7"),
        ('{"token_ids": [1], "prompt_id": "a"}', "prompt_id 'a' is that of line 1"),
    ],
)
def test_a_broken_row_is_named(tmp_path: Path, row: str, reason: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt_id": "a", "token_ids": [1]}\n' + row + "\n")
    with pytest.raises(ValueError, match=rf"prompts\.jsonl, line 2: .*{reason}"):
        read_prompts(path, 4)


def test_a_file_without_prompts(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match="no prompts"):
        read_prompts(tmp_path / "empty.jsonl", 4)


def test_random_prompts_keep_within_bounds_and_reach_them() -> None:
    prompts = random_prompts(count=200, min_tokens=2, max_tokens=5, vocab_size=7, seed=1)
    assert {len(p.token_ids) for p in prompts} == {2, 3, 4, 5}
    assert {t for p in prompts for t in p.token_ids} == set(range(7))
    assert prompts[:10] == random_prompts(count=10, min_tokens=2, max_tokens=5, vocab_size=7, seed=1)
    assert prompts != random_prompts(count=200, min_tokens=2, max_tokens=5, vocab_size=7, seed=2)


@given(st.integers(1, 9), st.lists(st.integers(0, 12), min_size=1, max_size=8), st.integers(0, 5))
def test_every_epoch_has_every_prompt_once_however_it_is_read(count: int, reads: list[int], seed: int) -> None:
    prompts = prompts_of(count)
    stream, whole = PromptStream(prompts, seed), PromptStream(prompts[::-1], seed)
    got = [p for n in reads for p in stream.next(n)]
    assert len(got) == sum(reads)
    assert got == whole.next(sum(reads)), "the order depends on neither the reads nor the order of the file"
    for start in range(0, len(got) - count + 1, count):
        assert {p.prompt_id for p in got[start : start + count]} == {p.prompt_id for p in prompts}


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    stream = PromptStream(prompts_of(16), 0)
    orders = [stream.next(16), stream.next(16), PromptStream(prompts_of(16), 1).next(16)]
    assert orders[0] != orders[1] != orders[2] != orders[0]


@given(st.integers(1, 9), st.integers(0, 30), st.integers(0, 30))
def test_a_resumed_stream_goes_on(count: int, before: int, after: int) -> None:
    stream = PromptStream(prompts_of(count), 3)
    stream.next(before)
    resumed = PromptStream(prompts_of(count), 3)
    resumed.load(stream.state())
    assert resumed.next(after) == stream.next(after)
    assert resumed.state() == stream.state()


def test_a_stream_refuses_the_state_of_another() -> None:
    stream = PromptStream(prompts_of(3), 0)
    for other in (PromptStream(prompts_of(4), 0), PromptStream(prompts_of(3), 1)):
        with pytest.raises(ValueError, match="not those of the saved stream"):
            other.load(stream.state())
    with pytest.raises(ValueError, match="unique"):
        PromptStream(prompts_of(2) * 2, 0)
    with pytest.raises(ValueError, match="at least one"):
        PromptStream([], 0)


def test_sample_seeds_belong_to_the_sample() -> None:
    prompts = prompts_of(4)
    requests = sample_requests(prompts, 3, seed=0, step=5)
    assert [r.sample_id for r in requests[:4]] == ["5/p0/0", "5/p0/1", "5/p0/2", "5/p1/0"]
    assert len({r.seed for r in requests}) == 12
    assert all(0 <= r.seed < 2**63 for r in requests)
    alone = sample_requests(prompts[2:3], 3, seed=0, step=5)
    assert alone == requests[6:9]
    assert {r.seed for r in sample_requests(prompts, 3, seed=0, step=6)}.isdisjoint(r.seed for r in requests)
    twice = sample_requests([prompts[0], prompts[0]], 2, seed=0, step=5)
    assert [r.sample_id for r in twice] == [f"5/p0/{i}" for i in range(4)]


def test_seeds_are_the_same_in_another_process() -> None:
    program = (
        "import json; from megarl.data.prompts import *;"
        "p = random_prompts(count=3, min_tokens=1, max_tokens=4, vocab_size=9, seed=0);"
        "print(json.dumps([[r.seed, *r.prompt.token_ids] for r in sample_requests(p, 2, seed=1, step=2)]))"
    )
    prompts = random_prompts(count=3, min_tokens=1, max_tokens=4, vocab_size=9, seed=0)
    here = [[r.seed, *r.prompt.token_ids] for r in sample_requests(prompts, 2, seed=1, step=2)]
    there = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True).stdout
    assert json.loads(there) == here
