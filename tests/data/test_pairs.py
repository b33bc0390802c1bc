"""Preference pairs, against transformers' own encoding of the same rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest

from megarl.config.schema import SourceFields
from megarl.data.pairs import load_pairs
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from tests.data.rows import jsonl, transformers_own

ASKED = {"role": "user", "content": "1+1?"}
GOOD = {"role": "assistant", "content": "2"}
BAD = {"role": "assistant", "content": "11"}


def load(
    source: SourceFields, tokenizer: Tokenizer | None = None, **changes: Any
) -> tuple[list[tuple[str, list[int], list[int], list[int]]], int]:
    """Key, prompt, chosen and rejected of each pair, and how many rows were left out."""
    options = {"vocab_size": 1000, "chat_template": False, "max_tokens": 100, "too_long": "refuse", **changes}
    found, dropped = load_pairs(source, tokenizer, **options)
    assert {array.dtype.name for p in found for array in (p.prompt_ids, p.chosen_ids, p.rejected_ids)} == {"int32"}
    return [(p.key, p.prompt_ids.tolist(), p.chosen_ids.tolist(), p.rejected_ids.tolist()) for p in found], dropped


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


def test_text(tmp_path: Path, llama: Path) -> None:
    source = jsonl(tmp_path, [{"prompt": "up ba:", "chosen": "ab", "rejected": ""}])
    oracle = transformers_own(llama)
    a, b = oracle.convert_tokens_to_ids(["a", "b"])
    bos, end = oracle.bos_token_id, oracle.eos_token_id
    assert load(source, load_tokenizer(llama))[0] == [("1", oracle("up ba:").input_ids, [a, b, end], [end])]
    said = [{"role": "user", "content": "up ba:"}]
    templated = oracle.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
    assert load(source, load_tokenizer(llama), chat_template=True)[0] == [("1", templated, [a, b, end], [end])]
    assert templated.count(bos) == 1


def test_ids_and_long_rows(tmp_path: Path) -> None:
    lengths = [(2, 3, 1), (3, 1, 3), (4, 1, 2), (1, 4, 9)]
    rows = [{"prompt_ids": [1] * p, "chosen_ids": [2] * c, "rejected_ids": [3] * r} for p, c, r in lengths]
    source = jsonl(tmp_path, rows)
    kept, dropped = load(source, max_tokens=6, too_long="drop")
    assert dropped == 1
    assert kept == [
        (str(i), [1] * p, [2] * c, [3] * r) for i, (p, c, r) in enumerate(lengths, start=1) if p + max(c, r) <= 6
    ]
    with pytest.raises(ValueError, match="line 4: 10 tokens are too many: at most 6 fit"):
        load(source, max_tokens=6)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"chosen": "a", "rejected": "b"}, "no column prompt_ids or token_ids or prompt; there are chosen, rejected"),
        ({"prompt": "a", "chosen": "b"}, "no column rejected_ids or rejected; there are prompt, chosen"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "the same response"),
        ({"prompt": "a", "chosen": "b", "rejected": "b<|im_end|>"}, "the same response"),
        ({"prompt": "a", "chosen": [ASKED], "rejected": "b"}, "list of one message of the assistant's"),
        ({"chosen": [ASKED, GOOD]}, "rejected must be a list of messages"),
        ({"chosen": [ASKED, GOOD], "rejected": "11"}, "rejected must be a list of messages"),
        ({"chosen": [ASKED, GOOD], "rejected": [GOOD, BAD]}, "differ before their last message"),
        ({"chosen": [ASKED, GOOD], "rejected": [BAD]}, "differ before their last message"),
        ({"chosen": [ASKED, GOOD], "rejected": [ASKED, ASKED]}, "their last message must be the assistant's"),
        ({"prompt": "2+2?", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, "not what they begin with"),
        ({"prompt": [GOOD], "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, "not what they begin with"),
    ],
)
def test_a_broken_row_is_named(tmp_path: Path, chatml: Path, row: dict[str, Any], reason: str) -> None:
    source = jsonl(tmp_path, [{"prompt": "a", "chosen": "b", "rejected": "c"}, row])
    with pytest.raises(ValueError, match=rf"rows\.jsonl, line 2: .*{reason}"):
        load(source, load_tokenizer(chatml))
