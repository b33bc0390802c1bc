"""Which metrics people see of a step: the few that tell how a run goes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

COLUMNS: Final[Mapping[str, Mapping[str, str]]] = {
    "sft": {"sft/loss": "loss", "sft/lr": "lr", "sft/grad_norm": "grad norm", "perf/tokens_per_second": "tokens/s"},
    "reward_model": {
        "reward_model/loss": "loss",
        "reward_model/accuracy": "accuracy",
        "reward_model/lr": "lr",
        "reward_model/grad_norm": "grad norm",
        "perf/tokens_per_second": "tokens/s",
    },
    "ppo": {
        "objective/score": "score",
        "objective/kl": "KL",
        "response_length/mean": "length",
        "policy/clipfrac": "clipped",
        "value/explained_variance": "explained",
        "rollout/logprob_gap": "gap",
        "time/rollout": "rollout s",
        "time/step": "step s",
    },
    "raft": {
        "objective/score": "score",
        "raft/selected_score": "selected",
        "raft/loss": "loss",
        "response_length/mean": "length",
        "time/rollout": "rollout s",
        "time/step": "step s",
    },
}
"""Of each stage: heading by metric, in order."""
