"""Algorithms as stages: `stage: grpo` is short for `stage: ppo` with what makes the algorithm, from its recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import yaml

RECIPES: Final = Path(__file__).parents[1] / "recipes"
SHORT_STAGES: Final = ("grpo", "dapo", "gspo", "cispo", "sapo", "gmpo", "rloo", "remax", "opo", "reinforce_pp")
_DEFINING: Final = ("advantage", "normalise", "policy_loss", "aggregation", "filter")


def short_stage(name: str) -> dict[str, Any]:
    """Returns the section `algo` that a short stage stands for, below the configuration's own settings."""
    recipe = yaml.safe_load((RECIPES / f"{name}.yaml").read_text(encoding="utf-8"))["algo"]
    return {key: recipe[key] for key in _DEFINING if key in recipe}
