"""Preference pairs, against transformers' own encoding of the same rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest

from megarl.config.schema import SourceFields
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.data.training_texts import load_candidates, load_pairs, load_rated
from tests.data.rows import encoder, jsonl, token_lists, transformers_own

ASKED = {"role": "user", "content": "1+1?"}
GOOD = {"role": "assistant", "content": "2"}
BAD = {"role": "assistant", "content": "11"}


def load(source: SourceFields, tokenizer: Tokenizer | None = None, **changes: Any) -> Any:
    drop = changes.pop("drop", ())
    return token_lists(load_pairs(source, encoder(tokenizer, **changes), drop=drop))


def margins_of(source: SourceFields, *, margins: bool = False) -> list[float | None]:
    return [pair.margin for pair in load_pairs(source, encoder(), margins=margins).items]


def test_every_form_of_a_chat_is_the_same_pair(tmp_path: Path, llama: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
        {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD], "prompt": "1+1?", "messages": [ASKED, GOOD]},
        {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD], "prompt": [ASKED]},
        {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": [ASKED], "chosen": "2", "rejected": "11", "prompt_id": "not a row's"},
    ]
    oracle = transformers_own(llama)
    prompt = oracle.apply_chat_template([ASKED], add_generation_prompt=True, return_dict=False)
    good, bad = (oracle.apply_chat_template([ASKED, last], return_dict=False)[len(prompt) :] for last in (GOOD, BAD))
    found, _ = load(jsonl(tmp_path, rows), load_tokenizer(llama))
    assert found == [(str(i), prompt, good, bad) for i in range(1, 6)]
    datasets.Dataset.from_list(rows[:1]).save_to_disk(tmp_path / "saved")
    assert load(SourceFields(path=str(tmp_path / "saved")), load_tokenizer(llama))[0] == found[:1]


def test_labels_are_true_or_false(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt_ids": [5], "response_ids": [6, 0], "label": True},
        {"prompt_ids": [5], "response_ids": [6, 0], "label": False},
    ]
    found = load_rated(jsonl(tmp_path, rows), encoder()).items
    assert [text.desirable for text in found] == [True, False]
    assert found[0].content != found[1].content, "a resumed run compares them"
    (found,) = load_rated(jsonl(tmp_path, [{**rows[0], "label": 1}]), encoder()).items
    assert found.desirable is True
    for wrong in ("true", 2, 0.5, None):
        with pytest.raises(ValueError, match=r"it must be true \(1\) for a desirable response, or false \(0\)"):
            load_rated(jsonl(tmp_path, [{**rows[0], "label": wrong}]), encoder())


def test_text_pairs(tmp_path: Path, llama: Path) -> None:
    source = jsonl(tmp_path, [{"prompt": "up ba:", "chosen": "ab", "rejected": "b"}])
    oracle = transformers_own(llama)
    a, b = oracle.convert_tokens_to_ids(["a", "b"])
    bos, end = oracle.bos_token_id, oracle.eos_token_id
    assert load(source, load_tokenizer(llama))[0] == [("1", oracle("up ba:").input_ids, [a, b, end], [b, end])]
    said = [{"role": "user", "content": "up ba:"}]
    templated = oracle.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
    assert load(source, load_tokenizer(llama), chat_template=True)[0] == [("1", templated, [a, b, end], [b, end])]
    assert templated.count(bos) == 1


def test_token_ids_and_long_rows(tmp_path: Path) -> None:
    lengths = [(2, 3, 1), (3, 1, 3), (4, 1, 2), (1, 4, 9)]
    rows = [{"prompt_ids": [1] * p, "chosen_ids": [2] * c, "rejected_ids": [3] * r} for p, c, r in lengths]
    source = jsonl(tmp_path, rows)
    kept, left_out = load(source, max_tokens=6, drop={"too_long"})
    assert left_out == [(4, "too_long")]
    assert kept == [
        (str(i), [1] * p, [2] * c, [3] * r) for i, (p, c, r) in enumerate(lengths, start=1) if p + max(c, r) <= 6
    ]
    with pytest.raises(ValueError, match="line 4: 10 tokens are too many: at most 6 fit"):
        load(source, max_tokens=6)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a", "chosen": "b"}, "must have a column rejected_ids or rejected; its columns are prompt, chosen"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "the same as another: one must be better"),
        ({"prompt": "a", "chosen": "b", "rejected": "b<|im_end|>"}, "the same as another: one must be better"),
        ({"prompt": "a", "chosen": "b", "rejected": "\n"}, "a response is empty"),
        ({"prompt": "a", "chosen": [ASKED], "rejected": "b"}, "list of one message of the assistant's"),
        ({"chosen": [ASKED, GOOD]}, "rejected must be a list of messages"),
        ({"chosen": [ASKED, GOOD], "rejected": [GOOD, BAD]}, "differ before their last message"),
        ({"chosen": [ASKED, GOOD], "rejected": [ASKED, ASKED]}, "their last message must be the assistant's"),
        ({"prompt": "2+2?", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, "not what they begin with"),
        ({"prompt": [GOOD], "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, "not what they begin with"),
    ],
)
def test_a_broken_row_is_named(tmp_path: Path, chatml: Path, row: dict[str, Any], reason: str) -> None:
    source = jsonl(tmp_path, [{"prompt": "a", "chosen": "b", "rejected": "c"}, row])
    with pytest.raises(ValueError, match=rf"rows\.jsonl, line 2: .*{reason}"):
        load(source, load_tokenizer(chatml))


def test_unusable_rows_are_skipped_by_rule(tmp_path: Path, chatml: Path) -> None:
    source = jsonl(
        tmp_path,
        [
            {"prompt": "a", "chosen": "b", "rejected": "b"},
            {"prompt": "a", "chosen": "", "rejected": "b"},
            {"prompt": "a", "chosen": "b", "rejected": "c" * 200},
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            {"chosen": [ASKED, GOOD], "rejected": [ASKED, GOOD]},
        ],
    )
    kept, left_out = load(source, load_tokenizer(chatml), drop={"too_long", "empty", "equal"})
    assert [key for key, *_ in kept] == ["4"]
    assert left_out == [(1, "equal"), (2, "empty"), (3, "too_long"), (5, "equal")]
    with pytest.raises(ValueError, match="2 of 5 rows are broken") as error:
        load(source, load_tokenizer(chatml), drop={"too_long", "empty"})
    assert "line 1 (and 1 more): the better response is the same as another" in str(error.value)


def test_margins(tmp_path: Path) -> None:
    pair = {"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3]}
    source = jsonl(tmp_path, [{**pair, "margin": margin} for margin in (0.5, -1, 3)])
    assert margins_of(source, margins=True) == [0.5, -1.0, 3.0]
    assert margins_of(source) == [None] * 3
    for broken in (True, "2", None):
        with pytest.raises(ValueError, match=r"line 1: margin is .*: it must be a number"):
            margins_of(jsonl(tmp_path, [{**pair, "margin": broken}], "broken.jsonl"), margins=True)


def candidates(source: SourceFields, tokenizer: Tokenizer | None = None) -> Any:
    return token_lists(load_candidates(source, encoder(tokenizer)))[0]


def test_the_best_candidate_comes_first(tmp_path: Path, chatml: Path) -> None:
    source = jsonl(
        tmp_path,
        [
            {"prompt_ids": [1], "candidates_ids": [[2], [3, 4], [2]], "best": 1},
            {"prompt": [ASKED], "candidates": ["11", [GOOD], "3"], "best": 1},
        ],
    )
    oracle = transformers_own(chatml)
    prompt = oracle.apply_chat_template([ASKED], add_generation_prompt=True, return_dict=False)
    texts = [[*oracle(said).input_ids, oracle.eos_token_id] for said in ("2", "11", "3")]
    assert candidates(source, load_tokenizer(chatml)) == [("1", [1], [3, 4], [2], [2]), ("2", prompt, *texts)]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"best": 3}, "best is 3: it must be the index of a candidate, from 0 to 2"),
        ({"best": True}, "best is True"),
        ({"candidates_ids": [[2]], "best": 0}, "candidates_ids must be a list of two responses or more"),
        (
            {"candidates_ids": [[2], [3]], "best": 0},
            "it has 2 candidates: all rows must have as many, and others have 3",
        ),
        ({"candidates_ids": [[2], [3], [3]]}, "the same as another"),
        ({"candidates_ids": [[2], [3], [4] * 100]}, "101 tokens are too many: at most 100 fit"),
    ],
)
def test_broken_candidates_are_named(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    row = {"prompt_ids": [1], "candidates_ids": [[2], [3], [4]], "best": 1}
    source = jsonl(tmp_path, [row, {**row, **changes}])
    with pytest.raises(ValueError, match=rf"rows\.jsonl, line 2: .*{reason}"):
        candidates(source)
