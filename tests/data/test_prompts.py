"""Prompts from rows, random prompts, and sample requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megarl.config.schema import SourceFields
from megarl.data.prompts import greedy_requests, load_prompts, random_prompts, sample_requests
from megarl.data.sources import Rows
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.types import Prompt
from tests.data.encoded_texts import encoded_lengths
from tests.data.rows import encoder, jsonl, transformers_own


def prompts_of(count: int) -> list[Prompt]:
    return [Prompt(prompt_id=f"p{i}", token_ids=(i,)) for i in range(count)]


def load(source: SourceFields, tokenizer: Tokenizer | None = None, **changes: Any) -> Sequence[Prompt]:
    return load_rows(source, tokenizer, **changes).items


def load_rows(source: SourceFields, tokenizer: Tokenizer | None = None, **changes: Any) -> Rows[Prompt]:
    drop = changes.pop("drop", ())
    return load_prompts(source, encoder(tokenizer, **changes), drop=drop)


def test_rows_of_ids(tmp_path: Path) -> None:
    rows = [
        {"token_ids": [3, 1], "answer": "x", "prompt": "text"},
        {"prompt_id": "b", "prompt_ids": [0]},
        {"prompt_id": 17, "token_ids": [2]},
    ]
    assert load(jsonl(tmp_path, rows), vocab_size=4) == [
        Prompt(prompt_id="1", token_ids=(3, 1), fields={"answer": "x", "prompt": "text"}),
        Prompt(prompt_id="b", token_ids=(0,)),
        Prompt(prompt_id="17", token_ids=(2,)),
    ]


def test_rows_of_text_and_chats(tmp_path: Path, llama: Path) -> None:
    chat = [{"role": "user", "content": "hi", "name": None}]
    said = [{"role": "user", "content": "hi"}]
    reward_model = {"style": "rule", "ground_truth": "4"}
    rows = [
        {"prompt": "hi", "messages": chat},
        {"prompt": chat, "reward_model": reward_model},
        {"messages": chat},
    ]
    oracle = transformers_own(llama)
    text = tuple(oracle("hi").input_ids)
    templated = tuple(oracle.apply_chat_template(said, add_generation_prompt=True, return_dict=False))
    tokenizer = load_tokenizer(llama)
    prompts = load(jsonl(tmp_path, rows), tokenizer)
    assert [prompt.token_ids for prompt in prompts] == [text, templated, templated]
    assert [prompt.fields for prompt in prompts] == [{"messages": chat}, {"reward_model": reward_model}, {}]
    prompts = load(jsonl(tmp_path, rows), tokenizer, chat_template=True)
    assert [prompt.token_ids for prompt in prompts] == [templated] * 3


def test_long_prompts(tmp_path: Path) -> None:
    source = jsonl(tmp_path, [{"token_ids": [1] * length} for length in (3, 4, 2, 5)])
    found = load_rows(source, max_tokens=3, drop={"too_long"})
    assert [prompt.prompt_id for prompt in found.items] == ["1", "3"]
    with pytest.raises(ValueError, match="2 of 4 rows are broken; the longest has at least 5 tokens"):
        load(source, max_tokens=3)


@pytest.mark.parametrize("kind", ["prompt", "messages", "many messages"])
def test_a_text_that_cannot_fit_is_not_encoded(
    tmp_path: Path, chatml: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest token has 12 characters."""
    text, said = "abcdefgh" * 1_000_000, {"role": "user", "content": "a"}
    long = {
        "prompt": {"prompt": text},
        "messages": {"messages": [said, {**said, "content": text}]},
        "many messages": {"messages": [said] * 200_000},
    }
    source, tokenizer = jsonl(tmp_path, [{"prompt": "a"}, long[kind]]), load_tokenizer(chatml)
    lengths = encoded_lengths(monkeypatch)
    found = load_rows(source, tokenizer, drop={"too_long"})
    with pytest.raises(
        ValueError, match="200000 messages" if kind == "many messages" else "800000. characters"
    ) as error:
        load(source, tokenizer)
    assert 0 < max(lengths) < 1000
    assert [prompt.prompt_id for prompt in found.items] == ["1"]
    assert "cannot fit into 100 tokens" in str(error.value)
    fits = jsonl(tmp_path, [{"prompt": "<|im_start|>" * 100}], "fits.jsonl")
    assert len(load(fits, tokenizer)[0].token_ids) == 100


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "a"}, "must have a column prompt_ids or token_ids or prompt or messages; its columns are text"),
        ({"token_ids": []}, "token_ids has no token"),
        ({"token_ids": [1, 1000]}, "token_ids holds 1000: ids are integers from 0 to 999"),
        ({"token_ids": [-1]}, "token_ids holds -1"),
        ({"token_ids": [True]}, "token_ids holds True"),
        ({"token_ids": [1], "prompt_id": 7.5}, "prompt_id is 7.5"),
        ({"token_ids": [1], "prompt_id": ""}, "prompt_id is ''"),
        ({"token_ids": [1], "prompt_id": "a"}, r"prompt_id 'a' is that of .*rows\.jsonl, line 1"),
        ({"prompt": ""}, "prompt has no token"),
        ({"prompt": 7}, "prompt must be a list of messages, or text"),
        ({"messages": "hi"}, "messages must be a list of messages$"),
        ({"messages": ["hi"]}, "a message has a role and a content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "role and content are not both text"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            "the last message of a prompt is the assistant's",
        ),
    ],
)
def test_a_broken_row_is_named(tmp_path: Path, chatml: Path, row: dict[str, Any], reason: str) -> None:
    source = jsonl(tmp_path, [{"prompt_id": "a", "token_ids": [1]}, row])
    with pytest.raises(ValueError, match=rf"rows\.jsonl, line 2: .*{reason}"):
        load(source, load_tokenizer(chatml))


def test_what_needs_a_tokenizer(tmp_path: Path, chatml: Path) -> None:
    source = jsonl(tmp_path, [{"prompt": "a"}])
    with pytest.raises(ValueError, match="line 1: text needs a tokenizer"):
        load(source)
    with pytest.raises(ValueError, match="chat_template needs a tokenizer"):
        load(source, chat_template=True)
    with pytest.raises(ValueError, match="the model's in use end at 9"):
        load(source, load_tokenizer(chatml), vocab_size=10)


def test_random_prompts_keep_within_bounds_and_reach_them() -> None:
    prompts = random_prompts(count=200, min_tokens=2, max_tokens=5, vocab_size=7, seed=1)
    assert {len(p.token_ids) for p in prompts} == {2, 3, 4, 5}
    assert {t for p in prompts for t in p.token_ids} == set(range(7))
    assert prompts[:10] == random_prompts(count=10, min_tokens=2, max_tokens=5, vocab_size=7, seed=1)
    assert prompts != random_prompts(count=200, min_tokens=2, max_tokens=5, vocab_size=7, seed=2)
    known = random_prompts(count=2, min_tokens=1, max_tokens=4, vocab_size=9, seed=0)
    assert [prompt.token_ids for prompt in known] == [(5, 4, 2, 2), (8, 8, 5)], "in every process and version"
    seeds = [request.seed for request in sample_requests(known, 1, seed=1, step=2)]
    assert seeds == [6549457716531909654, 1958836348557168490]


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


def test_no_column_of_a_row_changes_how_it_is_sampled(tmp_path: Path) -> None:
    wanted = {"temperature": 0.1, "top_p": 0.5, "max_new_tokens": 3, "sampling_params": {"top_k": 1}}
    (prompt,) = load(jsonl(tmp_path, [{"token_ids": [3], **wanted}]))
    assert prompt.fields == wanted
    (request,) = sample_requests([prompt], 1, seed=0, step=1)
    assert (request.temperature, request.max_new_tokens) == (None, None)


def test_every_distinct_prompt_has_one_greedy_response() -> None:
    first, second = prompts_of(2)
    requests = greedy_requests([first, second, first], step=3)
    assert [(r.sample_id, r.prompt, r.temperature) for r in requests] == [
        ("3/p0/greedy", first, 0.0),
        ("3/p1/greedy", second, 0.0),
    ]
    assert {r.temperature for r in sample_requests([first], 2, seed=0, step=3)} == {None}
