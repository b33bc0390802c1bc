"""The rows that docs/data.md shows are rows that load."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megarl.data.demonstrations import load_demonstrations
from megarl.data.pairs import load_pairs
from megarl.data.prompts import load_prompts
from megarl.data.tokenizer import load_tokenizer
from tests.data.rows import jsonl

DOCUMENT = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")


def rows_of(section: str) -> list[dict[str, Any]]:
    """The JSON lines under a heading."""
    text = DOCUMENT.split(f"### {section}")[1].split("\n#")[0]
    return [json.loads(line) for line in re.findall(r"^    (\{.*\})$", text, flags=re.MULTILINE)]


@pytest.mark.parametrize(
    ("section", "load", "count"),
    [
        ("Prompts", load_prompts, 3),
        ("Demonstrations", load_demonstrations, 3),
        ("Preference pairs", load_pairs, 4),
    ],
)
def test_the_rows_shown_load(tmp_path: Path, chatml: Path, section: str, load: Any, count: int) -> None:
    options = {"vocab_size": 1000, "chat_template": False, "max_tokens": 100, "too_long": "refuse"}
    items, dropped = load(jsonl(tmp_path, rows_of(section)), load_tokenizer(chatml), **options)
    assert (len(items), dropped) == (count, 0)


def test_the_report_shown_is_what_is_reported(tmp_path: Path, chatml: Path) -> None:
    rows: list[Any] = [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 10
    rows[6], rows[8] = '{"prompt": "a", "chosen": "b" "rejected": "c"}', {"prompt": "a", "chosen": "b"}
    source = jsonl(tmp_path, rows)
    options = {"vocab_size": 1000, "chat_template": False, "max_tokens": 100, "too_long": "refuse"}
    with pytest.raises(ValueError, match="2 of 10 rows are broken") as error:
        load_pairs(source, load_tokenizer(chatml), **options)
    for line in str(error.value).splitlines()[1:]:
        assert line.replace(source.path, "data/pairs.jsonl") in DOCUMENT
