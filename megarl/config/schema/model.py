"""The model that a run starts from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from megarl.config.schema.base import Count, Section, Seed


class RandomModel(Section):
    """A randomly initialised model instead of a checkpoint, for trials without one."""

    config: Mapping[str, Any]
    """Fields of the model's Hugging Face configuration; model_type chooses the architecture."""
    seed: Seed = 0
    """Seed of the weights."""


class Model(Section):
    """The model that is trained or evaluated; in PPO the reference starts as its copy, the critic from its body."""

    path: str | None = None
    """Directory of a Hugging Face checkpoint (config.json and safetensors)."""
    random: RandomModel | None = None
    """Make a random model instead; exactly one of path and random is given."""
    vocab_size: Count | None = None
    """Token ids in use: those from this number on are never sampled and have no probability; null uses all."""
    tokenizer: str | None = None
    """Directory of a Hugging Face tokenizer; null is the model's own, if its directory has one."""

    def hf_config(self) -> Mapping[str, Any]:
        """The model's Hugging Face configuration, read from its directory where it has one."""
        return self.random.config if self.random is not None else read_hf_config(self.path or "")


def read_hf_config(path: str) -> Mapping[str, Any]:
    """The config.json of a Hugging Face checkpoint directory.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a JSON object.
    """
    fields = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    if not isinstance(fields, dict):
        raise ValueError(f"{path}/config.json is not a JSON object")
    return cast(dict[str, Any], fields)
