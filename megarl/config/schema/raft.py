"""Reward-ranked fine-tuning: the configuration of a run."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from megarl.config.schema.base import Count, Section
from megarl.config.schema.choices import Choice, Chosen
from megarl.config.schema.data import LossOn, PromptData
from megarl.config.schema.reward import PeriodicEvaluation, Reward
from megarl.config.schema.rollout import Resharding, Rollout
from megarl.config.schema.run import Policy, TrainingConfig
from megarl.config.schema.scores import Scores
from megarl.types import RoleName


class BestOfPrompt(Choice):
    """The best sample of each prompt."""

    name: Literal["local"] = "local"


class BestOfStep(Choice):
    """The best samples of the whole step."""

    name: Literal["top"] = "top"
    fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Part of the samples that is kept."""


class RAFT(Section):
    """Which samples of a step are learnt, and how."""

    strategy: Annotated[BestOfPrompt | BestOfStep, Chosen(BestOfPrompt)] = BestOfPrompt()
    """Which samples are selected."""
    discard_unfinished: bool = False
    """Never select responses that the length limit ended."""
    min_score: float | None = None
    """Never select responses with a lower score; null selects any."""
    epochs: Count = 1
    """Passes over the selected samples."""
    mini_batches: Count = 1
    """Optimizer steps in a pass."""
    loss_on: LossOn = "response"
    """Tokens that are learnt."""


class RAFTConfig(TrainingConfig):
    """A run that answers, scores, selects, and fine-tunes on what is selected."""

    trained: ClassVar[tuple[RoleName, ...]] = ("actor",)

    stage: Literal["raft"]  # pyright: ignore[reportIncompatibleVariableOverride]  (frozen)
    """What the run does: reward-ranked fine-tuning."""
    rollout: Rollout
    """Generation with vLLM."""
    data: PromptData
    """The prompts."""
    raft: RAFT = RAFT()
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
