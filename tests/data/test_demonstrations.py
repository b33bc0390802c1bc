"""Demonstrations, against transformers' own encoding of the same rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.config.schema import SourceFields
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.data.training_texts import load_demonstrations
from tests.data.rows import encoder, jsonl, token_lists, transformers_own

ASKED = {"role": "user", "content": "1+1?"}
SAID = {"role": "assistant", "content": "2"}


def load(source: SourceFields, tokenizer: Tokenizer | None = None, **changes: Any) -> Any:
    drop = changes.pop("drop", ())
    return token_lists(load_demonstrations(source, encoder(tokenizer, **changes), drop=drop))


def test_every_form_of_a_chat_is_the_same_demonstration(tmp_path: Path, llama: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"messages": [ASKED, SAID]},
        {"messages": [ASKED, SAID], "prompt": "1+1?", "prompt_id": "not a row's"},
        {"prompt": [ASKED], "response": "2"},
        {"prompt": [ASKED], "completion": [SAID]},
        {"prompt": [ASKED], "response": "2</s>", "messages": [ASKED], "prompt_id": "not a row's"},
    ]
    oracle = transformers_own(llama)
    whole = oracle.apply_chat_template([ASKED, SAID], return_dict=False)
    prompt = oracle.apply_chat_template([ASKED], add_generation_prompt=True, return_dict=False)
    found, _ = load(jsonl(tmp_path, rows), load_tokenizer(llama))
    assert found == [(str(i), prompt, whole[len(prompt) :]) for i in range(1, 6)]
    pq.write_table(pa.Table.from_pylist(rows[:1]), tmp_path / "rows.parquet")
    assert load(SourceFields(path=str(tmp_path / "rows.parquet")), load_tokenizer(llama))[0] == found[:1]


def test_text_is_formatted_as_a_chat_if_configured(tmp_path: Path, chatml: Path) -> None:
    source = jsonl(tmp_path, [{"prompt": "1+1?", "response": "2"}])
    oracle = transformers_own(chatml)
    end = oracle.eos_token_id
    text, chat = (load(source, load_tokenizer(chatml), chat_template=flag)[0] for flag in (False, True))
    assert text == [("1", oracle("1+1?").input_ids, [*oracle("2").input_ids, end])]
    templated = oracle.apply_chat_template([ASKED], add_generation_prompt=True, return_dict=False)
    assert chat == [("1", templated, [*oracle("2").input_ids, end])]


def test_token_ids_are_used_unchanged(tmp_path: Path, chatml: Path) -> None:
    source = jsonl(tmp_path, [{"prompt_ids": [5, 6], "response_ids": [7]}, {"prompt_ids": [1], "response_ids": [1, 1]}])
    expected = [("1", [5, 6], [7]), ("2", [1], [1, 1])]
    assert load(source) == (expected, [])
    assert load(source, load_tokenizer(chatml)) == (expected, [])


def test_long_rows_are_skipped_or_refused(tmp_path: Path) -> None:
    lengths = [(2, 3), (3, 3), (4, 1), (1, 9)]
    source = jsonl(tmp_path, [{"prompt_ids": [1] * p, "response_ids": [2] * r} for p, r in lengths])
    kept, left_out = load(source, max_tokens=5, drop={"too_long"})
    assert [(len(p), len(r)) for _, p, r in kept] == [(2, 3), (4, 1)]
    assert left_out == [(2, "too_long"), (4, "too_long")]
    with pytest.raises(ValueError, match="line 2: 6 tokens are too many: at most 5 fit"):
        load(source, max_tokens=5)


def test_empty_responses_are_skipped_or_refused(tmp_path: Path, chatml: Path) -> None:
    said = [ASKED, {"role": "assistant", "content": "\n"}]
    rows = [{"prompt": "a", "response": " \t"}, {"prompt": "a", "response": "b"}, {"messages": said}]
    source = jsonl(tmp_path, [*rows, {"prompt_ids": [1], "response_ids": []}])
    kept, left_out = load(source, load_tokenizer(chatml), drop={"empty"})
    assert ([key for key, _, _ in kept], left_out) == (["2"], [(1, "empty"), (3, "empty"), (4, "empty")])
    with pytest.raises(ValueError, match=r"line 1 \(and 1 more\): a response is empty"):
        load(source, load_tokenizer(chatml), drop={"too_long"})


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a"}, "must have a column response_ids or response or completion; its columns are prompt"),
        ({"prompt": "a", "response": 3}, "response must be a list of messages, or text"),
        ({"prompt": "a", "completion": [SAID, SAID]}, "list of one message of the assistant's"),
        ({"prompt_ids": [1], "response_ids": [1000]}, "response_ids holds 1000"),
        ({"messages": [ASKED]}, "as its last message, the assistant's response"),
        ({"messages": [ASKED, SAID, SAID]}, "the last message of a prompt is the assistant's"),
        ({"prompt": "a", "response": "a<|im_end|>b"}, "must not continue after its end token"),
    ],
)
def test_a_broken_row_is_named(tmp_path: Path, chatml: Path, row: dict[str, Any], reason: str) -> None:
    source = jsonl(tmp_path, [{"prompt": "a", "response": "b"}, row])
    with pytest.raises(ValueError, match=rf"rows\.jsonl, line 2: .*{reason}"):
        load(source, load_tokenizer(chatml))
