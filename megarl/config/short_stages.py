"""Algorithms as stages: `stage: grpo` is short for `stage: ppo` with what makes the algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_GROUP: Final = {"advantage": {"name": "grpo", "eps": 1e-6, "ddof": 1}}

SHORT_STAGES: Final[Mapping[str, Mapping[str, Any]]] = {
    "grpo": {**_GROUP, "policy_loss": {"name": "ppo", "clip": 0.2}, "aggregation": "sequence_mean"},
    "dapo": {
        **_GROUP,
        "policy_loss": {"name": "ppo", "clip": 0.2, "clip_high": 0.28},
        "aggregation": "token_mean",
        "filter": "nonzero_std",
    },
    "gspo": {
        **_GROUP,
        "policy_loss": {"name": "gspo", "clip": 3e-4, "clip_high": 4e-4},
        "aggregation": "sequence_mean",
    },
    "cispo": {
        **_GROUP,
        "policy_loss": {"name": "cispo_upper", "max_ratio": 5.0},
        "aggregation": "token_mean",
        "filter": "nonzero_std",
    },
    "sapo": {
        **_GROUP,
        "policy_loss": {"name": "sapo", "tau_pos": 1.0, "tau_neg": 1.05},
        "aggregation": "sequence_mean",
    },
    "gmpo": {**_GROUP, "policy_loss": {"name": "gmpo", "clip": 0.4}, "aggregation": "sequence_mean"},
    "rloo": {"advantage": "rloo", "policy_loss": {"name": "ppo", "clip": 0.2}},
    "remax": {"advantage": "remax", "policy_loss": {"name": "ppo", "clip": 0.2, "dual_clip": 3.0}},
    "opo": {"advantage": "opo", "policy_loss": "reinforce", "aggregation": "token_mean"},
    "reinforce_pp": {
        "advantage": {"name": "reinforce_pp", "gamma": 1.0},
        "normalise": {"advantages": {"name": "whiten", "form": "var_clamp"}},
        "policy_loss": {"name": "ppo", "clip": 0.2},
    },
}
"""The section `algo` that a name stands for, as in the recipe of that name: below the configuration's own settings."""
