"""What a stage asks of a role: a new head, and the loss that trains it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megarl.config.schema.algo import Algo
from megarl.config.schema.choices import Choice
from megarl.config.schema.training_sections import ValueNorm


@dataclass(frozen=True, kw_only=True)
class NewHead:
    """A value or score head with normally distributed weights, the same on every rank.

    Args:
        std: standard deviation of the weights, or its rule; see ``algos.reward_shaping.head_std``.
    """

    std: float | Literal["inverse_sqrt", "inverse"]
    seed: int


@dataclass(frozen=True, kw_only=True)
class PolicySpec:
    """PPO's loss of an actor.

    Args:
        temperature: temperature of the rollouts.
        share, mix_share: factors of the policy loss and of the pretraining texts' loss.
        max_staleness: bound of the age of the weights that sampled a token, versions.
        value_norm: the critic's value normalizer, for the experience that the actor
            builds; None without one.
    """

    algo: Algo
    temperature: float
    share: float = 1.0
    mix_share: float = 0.0
    max_staleness: int = 0
    value_norm: ValueNorm | None = None


@dataclass(frozen=True, kw_only=True)
class ValueSpec:
    """PPO's loss of a critic."""

    algo: Algo


@dataclass(frozen=True, kw_only=True)
class TextSpec:
    """The negative log-likelihood of texts; ``stage`` is the prefix of its metrics."""

    stage: str


@dataclass(frozen=True, kw_only=True)
class PreferenceSpec:
    """A reward model's loss on preferences; ``stage`` is the prefix of its metrics."""

    stage: str
    loss: Choice


@dataclass(frozen=True, kw_only=True)
class DirectPreferenceSpec:
    """A policy's loss on preferences; ``stage`` is the prefix of its metrics."""

    stage: str
    loss: Choice


LossSpec = PolicySpec | ValueSpec | TextSpec | PreferenceSpec | DirectPreferenceSpec
