"""The fields of a run; ``megarl.config.rules`` has the rules between them."""

# Other modules import these names from here.
# ruff: noqa: F401
# pyright: reportUnusedImport=false

from megarl.config.schema.algo import (
    KL,
    Algo,
    Correction,
    CustomAdvantage,
    EarlyStop,
    Reject,
    Scores,
    Selection,
    TruncateAt,
)
from megarl.config.schema.base import Section
from megarl.config.schema.choices import Choice, CustomFunction
from megarl.config.schema.cluster_sections import (
    Cluster,
    Group,
    Groups,
    LogprobAgreement,
    Resharding,
    RoleConfig,
    Rollout,
    Threads,
    TimeLimits,
)
from megarl.config.schema.inputs import (
    Fault,
    LayerChoice,
    Model,
    PairData,
    PromptData,
    RandomModel,
    RowSettings,
    SourceFields,
    TextData,
    read_hf_config,
)
from megarl.config.schema.run_config import (
    STAGES,
    RolloutTrainingConfig,
    RunConfig,
    SamplingConfig,
    TrainingConfig,
    raw_stage_class,
    stage_class,
    stage_classes,
    trains,
    trains_on_rollouts,
)
from megarl.config.schema.scoring_sections import (
    EnvironmentSettings,
    Evaluation,
    HeldOut,
    JudgeModel,
    PeriodicEvaluation,
    Reward,
    RewardFunction,
)
from megarl.config.schema.training_sections import (
    PTX,
    Actor,
    CheckpointSettings,
    Critic,
    DirectReference,
    Health,
    LoRA,
    Normalisation,
    Optimizer,
    Policy,
    PreferenceTraining,
    Profiling,
    Reference,
    RewardTraining,
    Run,
    Tracking,
    TrainingRun,
    ValueNorm,
)
