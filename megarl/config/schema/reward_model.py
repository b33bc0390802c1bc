"""Training of a reward model: the configuration of a run."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from megarl.config.schema.base import Count, NotNegative, Positive, Section, Seed
from megarl.config.schema.choices import Choice, Chosen, Own
from megarl.config.schema.data import PairData, Source
from megarl.config.schema.rollout import Rollout
from megarl.config.schema.run import Optimizer, TrainingConfig
from megarl.types import RoleName


class Pairwise(Choice):
    """The negative log-likelihood of the preference, by the difference of a pair's scores (Bradley-Terry)."""

    name: Literal["pairwise"] = "pairwise"
    margin: bool = False
    """Take the rows' margin off the difference."""
    kind: Literal["logsigmoid", "logexp"] = "logsigmoid"
    """-log sigmoid(difference), or log(1 + exp(-difference)), the same without margin."""
    centering: NotNegative = 0.0
    """Weight of the squared sum of a pair's scores, which keeps the scores around 0."""


class BestOfN(Choice):
    """The cross-entropy of the chosen one among all candidates of a prompt, their scores being logits."""

    name: Literal["best_of_n"] = "best_of_n"


class Span(Choice):
    """pairwise for every token from the first in which the responses differ, averaged over a pair's tokens."""

    name: Literal["span"] = "span"


RewardLoss = Annotated[Pairwise | BestOfN | Span | Own, Chosen(Pairwise)]


class RewardTraining(Section):
    """The reward model's training; its body starts as the model's, its head normally distributed around 0."""

    optimizer: Optimizer
    """Optimizer of the reward model."""
    head_std: Literal["inverse_sqrt", "inverse"] = "inverse_sqrt"
    """Standard deviation of the head's initial weights: 1 / sqrt(hidden + 1), or 1 / (hidden + 1)."""
    head_seed: Seed = 0
    """Seed of the head's initial weights."""
    loss: RewardLoss = Pairwise()
    """How the preferences are learnt."""


class Normalisation(Section):
    """Reference samples, drawn from the model as it was before: the trained scores have this mean and std there."""

    prompts: Source
    """Rows with a prompt each."""
    samples: Count = 512
    """Prompts to answer, once each."""
    mean: float = 0.0
    """Mean that the scores get."""
    std: Positive = 1.0
    """Standard deviation that the scores get."""
    ddof: Literal[0, 1] = 0
    """What is taken off the number of samples in the variance that is measured: 0 population, 1 sample."""
    before: bool = False
    """Scale the head by the same samples before the training, too."""


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
