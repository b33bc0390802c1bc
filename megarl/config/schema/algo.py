"""The algorithm of a PPO run, part by part."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megarl.config.schema.advantages import GAE, VAPO, Advantage, OwnAdvantage, ReinforceReturns
from megarl.config.schema.base import Count, NotNegative, Positive, Section
from megarl.config.schema.choices import Choice, Chosen, Own
from megarl.config.schema.correction import Correction
from megarl.config.schema.kl import KL
from megarl.config.schema.losses import PPO, Aggregate, Aggregation, PolicyLoss, SquaredError, ValueLoss
from megarl.config.schema.normalisation import Normalise, Normaliser, Usual, Whiten
from megarl.config.schema.scores import Scores


class NonzeroStd(Choice):
    """Keep prompts whose samples have scores of a deviation above tol."""

    name: Literal["nonzero_std"] = "nonzero_std"
    tol: NotNegative = 0.0
    """The deviation that is still too small."""


class OpenRange(Choice):
    """Keep prompts whose samples have a mean score strictly between two bounds."""

    name: Literal["open_range"] = "open_range"
    low: float = 0.0
    """Lower bound."""
    high: float = 1.0
    """Upper bound."""


Filter = Annotated[NonzeroStd | OpenRange | Own, Chosen()]


class EarlyStop(Section):
    """Leave out the epochs that follow one in which the policy has moved too far."""

    kl: Positive
    """Aim for the mean of log p(old) - log p(new) over an epoch, nats per token."""
    factor: Annotated[float, Field(ge=1)] = 1.5
    """How many times that is too far."""


class Algo(Section):
    """PPO: each of a step's mini_batches equal parts makes one optimizer step, ppo_epochs times over."""

    advantage: Advantage = GAE()
    """How the rewards of a step become advantages."""
    normalise: Normalise = Normalise()
    """How advantages and rewards are normalised over a step."""
    policy_loss: PolicyLoss = PPO()
    """The actor's loss per token."""
    value_loss: ValueLoss = SquaredError()
    """The critic's loss per token."""
    aggregation: Aggregation = Aggregate()
    """How token losses make the loss."""
    kl: KL = KL()
    """The penalty for moving away from the reference."""
    entropy_coef: NotNegative = 0.0
    """Weight of the entropy bonus, loss per nat."""
    scores: Scores = Scores()
    """What becomes of a response's score before the algorithm sees it."""
    correction: Correction = Correction()
    """What is done about rollouts of another policy than the one in training."""
    filter: Filter | None = None
    """Which prompts a step is made of: further ones are answered until it is full; null takes all."""
    filter_rounds: Count = 10
    """Rounds of generation at most, with a filter; a step that is not full then takes the first of the others."""
    early_stop: EarlyStop | None = None
    """Leave out the epochs that follow one in which the policy has moved too far; null does not."""
    ppo_epochs: Count = 1
    """Passes over a step's samples."""
    mini_batches: Count = 1
    """Optimizer steps in a pass; divides prompts_per_step * samples_per_prompt."""

    @property
    def of_tokens(self) -> bool:
        """Whether advantages are made of the rewards of tokens, and not by comparing samples."""
        if isinstance(self.advantage, OwnAdvantage):
            return self.advantage.level == "token"
        return isinstance(self.advantage, GAE | VAPO | ReinforceReturns)

    @property
    def normaliser(self) -> Normaliser | None:
        """What normalises the advantages, with auto looked up; None where nothing does."""
        chosen = self.normalise.advantages
        if not isinstance(chosen, Usual):
            return chosen
        if chosen.name == "none" or self.advantage.name not in WHITENED:
            return None
        return WHITENED[self.advantage.name]


WHITENED = {
    **dict.fromkeys(("gae", "vapo", "reinforce_pp", "reinforce_pp_baseline"), Whiten()),
    "gdpo": Whiten(ddof=1),
}
"""What auto is for the estimators that normalise."""
