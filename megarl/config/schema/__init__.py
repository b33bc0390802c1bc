"""Every field of a run, typed and described, a class per stage.

Rules that hold within one field stand here; rules between fields are in ``megarl.config.rules``.
"""

from collections.abc import Mapping
from typing import Final

from megarl.config.schema.algo import Algo, EarlyStop
from megarl.config.schema.base import Section
from megarl.config.schema.choices import Choice, Own
from megarl.config.schema.correction import Correction, Reject
from megarl.config.schema.data import Fault, PairData, PromptData, RandomPrompts, RewardFunction, SourceFields, TextData
from megarl.config.schema.evaluation import EvalConfig, HeldOut
from megarl.config.schema.kl import KL, ReferenceSync
from megarl.config.schema.model import Model, RandomModel, read_hf_config
from megarl.config.schema.placement import Cluster, Group, RoleConfig, TimeLimits
from megarl.config.schema.ppo import PTX, Critic, PPOConfig, ValueNorm
from megarl.config.schema.raft import RAFT, RAFTConfig
from megarl.config.schema.reward import Evaluation, PeriodicEvaluation, Reward
from megarl.config.schema.reward_model import Normalisation, RewardModelConfig, RewardTraining
from megarl.config.schema.rollout import LogprobGate, Resharding, Rollout
from megarl.config.schema.run import (
    EMA,
    Actor,
    Checkpoint,
    Optimizer,
    Policy,
    Run,
    RunConfig,
    Tracking,
    TrainingConfig,
    TrainingRun,
)
from megarl.config.schema.scores import Scores, TruncateAt
from megarl.config.schema.sft import SFTConfig

STAGES: Final[Mapping[str, type[RunConfig]]] = {
    "sft": SFTConfig,
    "reward_model": RewardModelConfig,
    "ppo": PPOConfig,
    "raft": RAFTConfig,
    "eval": EvalConfig,
}
"""The configuration of each stage, by the value of ``stage``."""

__all__ = [
    "EMA",
    "KL",
    "PTX",
    "RAFT",
    "STAGES",
    "Actor",
    "Algo",
    "Checkpoint",
    "Choice",
    "Cluster",
    "Correction",
    "Critic",
    "EarlyStop",
    "EvalConfig",
    "Evaluation",
    "Fault",
    "Group",
    "HeldOut",
    "LogprobGate",
    "Model",
    "Normalisation",
    "Optimizer",
    "Own",
    "PPOConfig",
    "PairData",
    "PeriodicEvaluation",
    "Policy",
    "PromptData",
    "RAFTConfig",
    "RandomModel",
    "RandomPrompts",
    "ReferenceSync",
    "Reject",
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
    "Scores",
    "Section",
    "SourceFields",
    "TextData",
    "TimeLimits",
    "Tracking",
    "TrainingConfig",
    "TrainingRun",
    "TruncateAt",
    "ValueNorm",
    "read_hf_config",
]
