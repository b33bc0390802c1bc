"""The rows shown in docs/data.md can be loaded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megarl.data.prompts import load_prompts
from megarl.data.tokenizer import load_tokenizer
from megarl.data.training_texts import load_candidates, load_demonstrations, load_pairs, load_rated
from tests.data.rows import encoder, jsonl

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
        ("Candidates", load_candidates, 2),
        ("Labelled responses", load_rated, 3),
    ],
)
def test_the_documented_rows_load(tmp_path: Path, chatml: Path, section: str, load: Any, count: int) -> None:
    found = load(jsonl(tmp_path, rows_of(section)), encoder(load_tokenizer(chatml)))
    assert len(found.items) == count
