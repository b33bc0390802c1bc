"""Which ids end a response."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.rollout.requests import stop_token_ids


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 7}, None, (7,)),
        ({"eos_token_id": [7, 8]}, None, (7, 8)),
        ({"eos_token_id": 7}, {"eos_token_id": [9, 7]}, (9, 7)),
        ({"eos_token_id": 7}, {"temperature": 1.0}, (7,)),
        ({"eos_token_id": None}, None, ()),
        ({}, {}, ()),
    ],
)
def test_the_generation_config_takes_precedence(
    tmp_path: Path, config: dict[str, Any], generation: dict[str, Any] | None, expected: tuple[int, ...]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert stop_token_ids(tmp_path) == expected
