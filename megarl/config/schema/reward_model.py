"""Training of a reward model: the configuration of a run."""

from __future__ import annotations

from typing import ClassVar, Literal

from megarl.config.schema.base import Count, NotNegative, Section, Seed
from megarl.config.schema.data import PairData, Source
from megarl.config.schema.rollout import Rollout
from megarl.config.schema.run import Optimizer, RunConfig
from megarl.types import RoleName


class RewardTraining(Section):
    """The reward model's training; its body starts as the model's, its head N(0, 1 / sqrt(hidden + 1))."""

    optimizer: Optimizer
    """Optimizer of the reward model."""
    head_seed: Seed = 0
    """Seed of the head's initial weights."""
    centering: NotNegative = 0.0
    """Weight of the squared sum of a pair's scores in the loss, which keeps the scores around 0."""


class Normalisation(Section):
    """Reference samples, drawn from the model as it was before: the trained scores have mean 0 and variance 1 there."""

    prompts: Source
    """Rows with a prompt each."""
    samples: Count = 512
    """Prompts to answer, once each."""


class RewardModelConfig(RunConfig):
    """A run that trains the role reward on preference pairs (Bradley-Terry)."""

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
