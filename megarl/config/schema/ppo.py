"""PPO and its relatives: the configuration of a run."""

from __future__ import annotations

from typing import ClassVar, Literal

from megarl.config.schema.algo import Algo
from megarl.config.schema.base import Count, Decay, Natural, NotNegative, Positive, Section, Seed
from megarl.config.schema.data import LossOn, PromptData, Source
from megarl.config.schema.reward import PeriodicEvaluation, Reward
from megarl.config.schema.rollout import Resharding, Rollout
from megarl.config.schema.run import Optimizer, Policy, TrainingConfig
from megarl.types import RoleName


class ValueNorm(Section):
    """The critic learns returns of mean 0 and variance 1, by moving moments."""

    beta: Decay = 0.99995
    """Decay of the moments per step."""
    eps: Positive = 1e-5
    """Keeps the correction of the moments' start off 0."""


class Critic(Section):
    """The value function's training."""

    optimizer: Optimizer
    """Optimizer of the critic."""
    path: str | None = None
    """Hugging Face checkpoint whose body the critic starts from, a reward model's for example; null is the model's."""
    head: Literal["new", "loaded"] = "new"
    """The value head: a new one, or the score head of path."""
    head_std: NotNegative = 0.0
    """Standard deviation of a new head's initial weights; 0 starts with all values at 0."""
    head_seed: Seed = 0
    """Seed of a new head's initial weights."""
    warmup_steps: Natural = 0
    """First steps of the run in which the critic alone is trained."""
    value_norm: ValueNorm | None = None
    """Normalise what the critic learns; null does not."""


class PTX(Section):
    """Texts that the actor learns beside the rollouts, in the same optimizer steps."""

    data: Source
    """Rows as of data.train of stage sft."""
    max_tokens: Count
    """Tokens of a row, at most."""
    sequences_per_mini_batch: Count
    """Rows in each optimizer step; the data begins again when it is through."""
    coef: NotNegative
    """Weight of their loss, the mean negative log-likelihood per token."""
    mode: Literal["add", "convex", "deepspeed"] = "add"
    """The whole: policy + coef * texts; (1 - coef) * policy + coef * texts; half of the first."""
    loss_on: LossOn = "all"
    """Tokens that are learnt."""
    chat_template: bool = False
    """Text prompts are what a user says: put them into the tokenizer's chat template. Chats always are."""


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
