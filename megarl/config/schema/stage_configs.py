"""The configuration of each stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, Literal

from pydantic import Field

from megarl.config.schema.algo import Algo
from megarl.config.schema.base import Section, parse_devices
from megarl.config.schema.cluster_sections import Cluster, Groups, Resharding, RoleConfig, Rollout
from megarl.config.schema.inputs import Model, PairData, PromptData, TextData
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
    Health,
    Normalisation,
    Optimizer,
    Policy,
    Profiling,
    RewardTraining,
    Run,
    Tracking,
    TrainingRun,
)
from megarl.types import Layout, RoleName


@dataclass(frozen=True, kw_only=True)
class LargestBatches:
    """The largest passes of a run's roles.

    Args:
        tokens: most tokens of a sequence, or of a preference's pair.
        inference: most sequences of an inference pass.
        update: most sequences of an optimizer step.
    """

    tokens: int
    inference: int
    update: int


class RunConfig(Section):
    """The fields of all stages."""

    trained: ClassVar[tuple[RoleName, ...]] = ()
    """Roles that the stage trains; their optimizers are in the sections of their names."""
    rows_field: ClassVar[str] = "data.train"
    """The field of the training data."""

    stage: Literal["sft", "reward_model", "ppo", "eval"]
    """The kind of run."""
    run: Run
    """The run itself."""
    model: Model
    """The model."""
    cluster: Cluster = Cluster()
    """The devices of the run."""
    groups: Groups
    """Groups of devices by name, and the roles in each; null removes an inherited group. A run without groups,
    rollout.devices and cluster's devices takes one device of this machine."""
    tracking: Tracking = Tracking()
    """Where the metrics go."""

    @property
    def engine_settings(self) -> Rollout | None:
        """The settings of the run's engines; None without engines."""
        return None

    @property
    def judge_model(self) -> JudgeModel | None:
        """The model on engines of its own that judges responses; None without one."""
        return None

    @property
    def rows_section(self) -> tuple[str, TextData | PairData | PromptData | HeldOut]:
        """The section whose settings decide how all rows are read, and its name."""
        raise NotImplementedError

    @property
    def largest_batches(self) -> LargestBatches:
        """The sizes from which the memory of a role's passes follows."""
        raise NotImplementedError

    def has_role(self, role: RoleName) -> bool:
        return any(role in group.roles for group in self.groups.values())

    def group_of(self, role: RoleName) -> str:
        """Returns the name of the role's group; raises KeyError if no group has it."""
        for name, group in self.groups.items():
            if role in group.roles:
                return name
        raise KeyError(role)

    def role(self, role: RoleName) -> RoleConfig:
        return self.groups[self.group_of(role)].roles[role]

    def device_list(self, group: str) -> tuple[int, ...]:
        """Returns the devices of a group, by rank."""
        return parse_devices(self.groups[group].devices)

    def layout(self, role: RoleName) -> Layout:
        """Returns how the role is split over its group, with dp = devices / (tp * pp)."""
        own, devices = self.role(role), len(self.device_list(self.group_of(role)))
        dp, sequence_parallel = devices // (own.tp * own.pp), own.sequence_parallel
        return Layout(tp=own.tp, pp=own.pp, dp=dp, vpp=own.vpp, ep=own.ep, sequence_parallel=sequence_parallel)


class TrainingConfig(RunConfig):
    """The fields of all stages that train."""

    run: TrainingRun  # pyright: ignore[reportIncompatibleVariableOverride]  (frozen)
    """The run itself."""
    checkpoint: CheckpointSettings = CheckpointSettings()
    """Checkpoints, from which the run resumes."""
    profile: Profiling | None = None
    """Steps with torch's profiler; null profiles none."""
    health: Health = Health()
    """The checks of the run's own metrics."""

    @property
    def steps(self) -> int:
        """Steps of the run; those of epochs are known when the rows are read (`preflight.epochs.with_steps`)."""
        assert self.run.steps is not None
        return self.run.steps

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of a trained role in one step of the run."""
        return 1

    @property
    def rows_per_step(self) -> int:
        """Rows of the training data in one step of the run."""
        raise NotImplementedError

    @property
    def saved(self) -> tuple[RoleName, ...]:
        """The roles in checkpoints."""
        return tuple(role for role in self.trained if self.has_role(role))

    def optimizer_steps(self, role: RoleName) -> int:
        """Returns the optimizer steps of a trained role in the run, which its learning rate's schedule covers."""
        del role
        return self.steps * self.updates_per_step

    def optimizer(self, role: RoleName) -> Optimizer:
        return getattr(self, role).optimizer


class SFTConfig(TrainingConfig):
    """Supervised fine-tuning of the role actor."""

    trained: ClassVar[tuple[RoleName, ...]] = ("actor",)

    stage: Literal["sft"]  # pyright: ignore[reportIncompatibleVariableOverride]  (frozen)
    """Supervised fine-tuning."""
    data: TextData
    """The demonstrations."""
    actor: Actor
    """The policy's training."""

    @property
    def rows_section(self) -> tuple[str, TextData]:
        return "data", self.data

    @property
    def rows_per_step(self) -> int:
        return self.data.sequences_per_step

    @property
    def largest_batches(self) -> LargestBatches:
        sequences = self.data.sequences_per_step
        return LargestBatches(tokens=self.data.max_tokens, inference=sequences, update=sequences)


class RewardModelConfig(TrainingConfig):
    """Training of the role reward on preferences."""

    trained: ClassVar[tuple[RoleName, ...]] = ("reward",)

    stage: Literal["reward_model"]  # pyright: ignore[reportIncompatibleVariableOverride]  (frozen)
    """Training of a reward model."""
    data: PairData
    """The preference pairs."""
    reward: RewardTraining
    """The reward model's training."""
    normalisation: Normalisation | None = None
    """Scale the scores by reference samples; null does not. Needs rollout."""
    rollout: Rollout | None = None
    """Generation of the reference samples."""

    @property
    def engine_settings(self) -> Rollout | None:
        return self.rollout

    @property
    def rows_section(self) -> tuple[str, PairData]:
        return "data", self.data

    @property
    def rows_per_step(self) -> int:
        return self.data.pairs_per_step

    @property
    def largest_batches(self) -> LargestBatches:
        pairs = self.data.pairs_per_step
        return LargestBatches(tokens=2 * self.data.max_tokens, inference=pairs, update=pairs)


class SamplingConfig(RunConfig):
    """The fields of stages whose engines answer prompts that are then scored."""

    rollout: Rollout
    """Generation with vLLM."""
    reward: Reward = Reward()
    """The score of a response."""
    environment: EnvironmentSettings | None = None
    """The environment of multi-turn rollouts; null: single-turn."""
    evaluation: Evaluation | None = None
    """Held-out prompts."""

    @property
    def engine_settings(self) -> Rollout:
        return self.rollout

    @property
    def scored_functions(self) -> tuple[RewardFunction, ...]:
        """The functions that score the rollouts of the stage itself."""
        return self.reward.functions

    @property
    def judge_model(self) -> JudgeModel | None:
        return self.reward.judge_model


class RolloutTrainingConfig(TrainingConfig, SamplingConfig):  # pyright: ignore[reportIncompatibleVariableOverride]
    """The fields of stages that train the actor on its own responses."""

    data: PromptData
    """The prompts."""
    actor: Policy
    """The policy's training."""
    evaluation: PeriodicEvaluation | None = None  # pyright: ignore[reportIncompatibleVariableOverride]  (frozen)
    """Held-out prompts."""
    resharding: Resharding = Resharding()
    """The transfer of weights into the engines."""

    rows_field: ClassVar[str] = "data.prompts"

    @property
    def rows_section(self) -> tuple[str, PromptData]:
        return "data", self.data

    @property
    def rows_per_step(self) -> int:
        return self.data.prompts_per_step

    @property
    def samples_per_step(self) -> int:
        return self.data.prompts_per_step * self.data.samples_per_prompt


class PPOConfig(RolloutTrainingConfig):
    """PPO and its relatives."""

    trained: ClassVar[tuple[RoleName, ...]] = ("actor", "critic")

    stage: Literal["ppo"]  # pyright: ignore[reportIncompatibleVariableOverride]  (frozen)
    """PPO."""
    algo: Algo = Algo()
    """The algorithm."""
    critic: Critic | None = None
    """The critic's training, if the algorithm has one."""
    ptx: PTX | None = None
    """Pretraining texts, on which the actor is trained together with the rollouts; null is none."""

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of a trained role in one step of the run."""
        return self.algo.ppo_epochs * self.algo.mini_batches

    @property
    def saved(self) -> tuple[RoleName, ...]:
        """The roles in checkpoints, with a reference that moves towards the actor."""
        return super().saved if self.algo.kl.reference_sync is None else (*super().saved, "reference")

    def optimizer_steps(self, role: RoleName) -> int:
        """Returns the optimizer steps of a trained role in the run; the actor has none in the critic's warm-up."""
        waited = self.critic.warmup_steps if role == "actor" and self.critic is not None else 0
        return (self.steps - waited) * self.updates_per_step

    @property
    def largest_batches(self) -> LargestBatches:
        update = -(-self.samples_per_step // self.algo.mini_batches)
        return LargestBatches(tokens=self.rollout.max_model_len, inference=self.samples_per_step, update=update)


class EvalConfig(SamplingConfig):
    """Evaluation of a checkpoint: responses to held-out prompts, and their scores."""

    stage: Literal["eval"]  # pyright: ignore[reportIncompatibleVariableOverride]  (frozen)
    """Evaluation."""
    run: Run
    """The run itself."""
    groups: Groups = Field(default={})  # pyright: ignore[reportIncompatibleVariableOverride]  (frozen)
    """Groups of devices by name, with the role reward if a reward model scores."""
    evaluation: HeldOut  # pyright: ignore[reportIncompatibleVariableOverride, reportGeneralTypeIssues]  (frozen)
    """The prompts, and the functions to report."""

    @property
    def scored_functions(self) -> tuple[RewardFunction, ...]:
        return self.evaluation.functions

    @property
    def rows_section(self) -> tuple[str, HeldOut]:
        return "evaluation", self.evaluation

    @property
    def largest_batches(self) -> LargestBatches:
        return LargestBatches(tokens=self.rollout.max_model_len, inference=1 << 20, update=1)


STAGES: Final[Mapping[str, type[RunConfig]]] = {
    "sft": SFTConfig,
    "reward_model": RewardModelConfig,
    "ppo": PPOConfig,
    "eval": EvalConfig,
}
"""The configuration of each stage, by the value of ``stage``."""
