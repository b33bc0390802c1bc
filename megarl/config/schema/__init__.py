"""Every field of a run, typed and described, a class per stage.

Rules that hold within one field stand here; rules between fields are in ``megarl.config.rules``.
"""

from collections.abc import Mapping
from typing import Final

from megarl.config.schema.base import Section
from megarl.config.schema.data import PairData, PromptData, RandomPrompts, RewardFunction, SourceFields, TextData
from megarl.config.schema.model import Model, RandomModel, read_hf_config
from megarl.config.schema.placement import Cluster, Group, RoleConfig, TimeLimits
from megarl.config.schema.ppo import KL, Algo, Critic, Evaluation, PPOConfig, Reward
from megarl.config.schema.reward_model import Normalisation, RewardModelConfig, RewardTraining
from megarl.config.schema.rollout import LogprobGate, Resharding, Rollout
from megarl.config.schema.run import Actor, Checkpoint, Optimizer, Run, RunConfig, Tracking
from megarl.config.schema.sft import SFTConfig

STAGES: Final[Mapping[str, type[RunConfig]]] = {
    "sft": SFTConfig,
    "reward_model": RewardModelConfig,
    "ppo": PPOConfig,
}
"""The configuration of each stage, by the value of ``stage``."""

__all__ = [
    "KL",
    "STAGES",
    "Actor",
    "Algo",
    "Checkpoint",
    "Cluster",
    "Critic",
    "Evaluation",
    "Group",
    "LogprobGate",
    "Model",
    "Normalisation",
    "Optimizer",
    "PPOConfig",
    "PairData",
    "PromptData",
    "RandomModel",
    "RandomPrompts",
    "Resharding",
    "Reward",
    "RewardFunction",
    "RewardModelConfig",
    "RewardTraining",
    "RoleConfig",
    "Rollout",
    "Run",
    "RunConfig",
    "SFTConfig",
    "Section",
    "SourceFields",
    "TextData",
    "TimeLimits",
    "Tracking",
    "read_hf_config",
]
