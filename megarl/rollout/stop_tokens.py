"""What ends a response, as a Hugging Face directory says."""

from __future__ import annotations

import json
from pathlib import Path

from megarl.weights.files import read_config


def stop_token_ids(model_dir: str | Path) -> tuple[int, ...]:
    """The ids that end a response: those of generation_config.json, else of config.json; none where neither says."""
    path = Path(model_dir) / "generation_config.json"
    generation = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    ids = generation.get("eos_token_id")
    if ids is None:
        ids = read_config(model_dir).get("eos_token_id")
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (ids,)
