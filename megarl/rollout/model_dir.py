"""What an engine reads of a Hugging Face model directory besides weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def hf_config(model_dir: str | Path) -> dict[str, Any]:
    """The model's config.json."""
    return json.loads((Path(model_dir) / "config.json").read_text(encoding="utf-8"))


def stop_token_ids(model_dir: str | Path) -> tuple[int, ...]:
    """The ids that end a response: those of generation_config.json, else of config.json; none where neither says."""
    path = Path(model_dir) / "generation_config.json"
    generation = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    ids = generation.get("eos_token_id")
    if ids is None:
        ids = hf_config(model_dir).get("eos_token_id")
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (ids,)
