"""The configuration of each stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final, Literal

from pydantic import Field

from megarl.config.schema.algo import Algo, Scores
from megarl.config.schema.base import Section, parse_devices
from megarl.config.schema.inputs import Model, PairData, PromptData, TextData
from megarl.config.schema.resources import Cluster, Groups, Resharding, RoleConfig, Rollout
from megarl.config.schema.scoring_sections import HeldOut, PeriodicEvaluation, Reward
from megarl.config.schema.training_sections import (
    PTX,
    Actor,
    CheckpointSettings,
    Critic,
    Normalisation,
    Optimizer,
    Policy,
    RAFTSettings,
    RewardTraining,
    Run,
    Tracking,
    TrainingRun,
)
from megarl.types import Layout, RoleName


class RunConfig(Section):
    """What the configurations of all stages have in common."""

    trained: ClassVar[tuple[RoleName, ...]] = ()
    """Roles that the stage trains; their optimizers are in the sections of their names."""

    stage: Literal["sft", "reward_model", "ppo", "raft", "eval"]
    """What the run does."""
    run: Run
    """The run itself."""
    model: Model
    """The model."""
    cluster: Cluster = Cluster()
    """The devices of the run."""
    groups: Groups
    """Groups of devices by name, and the roles placed in each; null removes an inherited group."""
    tracking: Tracking = Tracking()
    """Where the metrics go."""

    def has_role(self, role: RoleName) -> bool:
        """Whether a group has the role."""
        return any(role in group.roles for group in self.groups.values())

    def group_of(self, role: RoleName) -> str:
        """The name of the group that has the role.

        Raises:
            KeyError: no group has it.
        """
        for name, group in self.groups.items():
            if role in group.roles:
                return name
        raise KeyError(role)

    def role(self, role: RoleName) -> RoleConfig:
        """The role's own settings."""
        return self.groups[self.group_of(role)].roles[role]

    def device_list(self, group: str) -> tuple[int, ...]:
        """The devices of a group, in the order of its ranks."""
        return parse_devices(self.groups[group].devices)

    def layout(self, role: RoleName) -> Layout:
        """How the role is split over its group; data parallelism is what tp and pp leave."""
        own = self.role(role)
        devices = len(self.device_list(self.group_of(role)))
        return Layout(
            tp=own.tp,
            pp=own.pp,
            dp=devices // (own.tp * own.pp),
            vpp=own.vpp,
            ep=own.ep,
            sequence_parallel=own.sequence_parallel,
        )


class TrainingConfig(RunConfig):
    """What the configurations of all stages have in common that train."""

    run: TrainingRun  # pyright: ignore[reportIncompatibleVariableOverride]  (frozen)
    """The run itself."""
    checkpoint: CheckpointSettings = CheckpointSettings()
    """What the run keeps to go on after an interruption."""

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of a trained role in a step of the run."""
        return 1

    @property
    def saved(self) -> tuple[RoleName, ...]:
        """The roles of the run that checkpoints have."""
        return tuple(role for role in self.trained if self.has_role(role))

    def optimizer_steps(self, role: RoleName) -> int:
        """Optimizer steps of a trained role in the whole run: the length of the learning rate's schedule."""
        del role
        return self.run.steps * self.updates_per_step

    def optimizer(self, role: RoleName) -> Optimizer:
        """The optimizer of a trained role."""
        return getattr(self, role).optimizer


class SFTConfig(TrainingConfig):
    """A run of supervised fine-tuning of the role actor."""

    trained: ClassVar[tuple[RoleName, ...]] = ("actor",)

    stage: Literal["sft"]  # pyright: ignore[reportIncompatibleVariableOverride]  (frozen)
    """What the run does: supervised fine-tuning."""
    data: TextData
    """The demonstrations."""
    actor: Actor
    """The policy's training."""


class RewardModelConfig(TrainingConfig):
    """A run that trains the role reward on preferences."""

    trained: ClassVar[tuple[RoleName, ...]] = ("reward",)

    stage: Literal["reward_model"]  # pyright: ignore[reportIncompatibleVariableOverride]  (frozen)
    """What the run does: training a reward model."""
    data: PairData
    """The preference pairs."""
    reward: RewardTraining
    """The reward model's training."""
    normalisation: Normalisation | None = None
    """Reference samples for the scale of the scores; null leaves the scores as they are. Needs rollout."""
    rollout: Rollout | None = None
    """Generation of the reference samples."""


class PPOConfig(TrainingConfig):
    """A run of PPO, or of a relative of it."""

    trained: ClassVar[tuple[RoleName, ...]] = ("actor", "critic")

    stage: Literal["ppo"]  # pyright: ignore[reportIncompatibleVariableOverride]  (frozen)
    """What the run does: PPO."""
    rollout: Rollout
    """Generation with vLLM."""
    data: PromptData
    """The prompts."""
    algo: Algo = Algo()
    """The algorithm."""
    actor: Policy
    """The policy's training."""
    critic: Critic | None = None
    """The value function's training, where the algorithm has a critic."""
    ptx: PTX | None = None
    """Texts that the actor learns beside the rollouts; null is none."""
    reward: Reward = Reward()
    """What scores a response."""
    evaluation: PeriodicEvaluation | None = None
    """Held-out prompts."""
    resharding: Resharding = Resharding()
    """The transfer of weights into the engines."""

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of a trained role in a step of the run."""
        return self.algo.ppo_epochs * self.algo.mini_batches

    @property
    def saved(self) -> tuple[RoleName, ...]:
        """The roles of the run that checkpoints have: a reference, too, that follows the actor."""
        return super().saved if self.algo.kl.reference_sync is None else (*super().saved, "reference")

    def optimizer_steps(self, role: RoleName) -> int:
        """Optimizer steps of a trained role in the whole run: the actor has none while the critic is warmed up."""
        waited = self.critic.warmup_steps if role == "actor" and self.critic is not None else 0
        return (self.run.steps - waited) * self.updates_per_step


class RAFTConfig(TrainingConfig):
    """A run that answers, scores, selects, and fine-tunes on what is selected."""

    trained: ClassVar[tuple[RoleName, ...]] = ("actor",)

    stage: Literal["raft"]  # pyright: ignore[reportIncompatibleVariableOverride]  (frozen)
    """What the run does: reward-ranked fine-tuning."""
    rollout: Rollout
    """Generation with vLLM."""
    data: PromptData
    """The prompts."""
    raft: RAFTSettings = RAFTSettings()
    """Which samples are learnt, and how."""
    scores: Scores = Scores()
    """What becomes of a response's score before samples are selected."""
    actor: Policy
    """The policy's training."""
    reward: Reward = Reward()
    """What scores a response."""
    evaluation: PeriodicEvaluation | None = None
    """Held-out prompts."""
    resharding: Resharding = Resharding()
    """The transfer of weights into the engines."""

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps in a step of the run."""
        return self.raft.epochs * self.raft.mini_batches


class EvalConfig(RunConfig):
    """A run that answers held-out prompts with a checkpoint, and scores the answers."""

    stage: Literal["eval"]  # pyright: ignore[reportIncompatibleVariableOverride]  (frozen)
    """What the run does: evaluation."""
    run: Run
    """The run itself."""
    groups: Groups = Field(default={})  # pyright: ignore[reportIncompatibleVariableOverride]  (frozen)
    """Groups of devices by name, with the role reward where a reward model scores."""
    rollout: Rollout
    """Generation with vLLM, which reads the weights from the model's files."""
    evaluation: HeldOut
    """The prompts, and what is reported."""
    reward: Reward = Reward()
    """What scores a response beside the functions of the evaluation."""


STAGES: Final[Mapping[str, type[RunConfig]]] = {
    "sft": SFTConfig,
    "reward_model": RewardModelConfig,
    "ppo": PPOConfig,
    "raft": RAFTConfig,
    "eval": EvalConfig,
}
"""The configuration of each stage, by the value of ``stage``."""
