"""How advantages and rewards are normalised over a step."""

from __future__ import annotations

from typing import Annotated, Literal

from megarl.config.schema.base import Positive, Section
from megarl.config.schema.choices import Choice, Chosen, Own

Level = Literal["batch", "group"]


class Usual(Choice):
    """auto is what the estimator's source does: whiten for gae, vapo, reinforce_pp, reinforce_pp_baseline and, with
    ddof 1, gdpo; none for the others. none leaves the advantages as they are."""

    name: Literal["auto", "none"] = "auto"


class Whiten(Choice):
    """Shift and scale to mean 0 and variance 1 over the response tokens of the step."""

    name: Literal["whiten"] = "whiten"
    ddof: Literal[0, 1] = 0
    """The variance's degrees of freedom that are taken off the number of tokens."""
    form: Literal["var_plus_eps", "var_clamp", "std_plus_eps"] = "var_plus_eps"
    """The divisor: sqrt(variance + eps), sqrt(max(variance, eps)), or the deviation + eps."""
    mean_only: bool = False
    """Shift alone."""
    eps: Positive = 1e-8
    """Keeps the divisor off 0."""


class GroupedTokens(Choice):
    """Whiten over the response tokens of each prompt's samples: long responses weigh more."""

    name: Literal["grouped_tokens"] = "grouped_tokens"
    ddof: Literal[0, 1] = 0
    """The variance's degrees of freedom that are taken off the number of tokens."""
    eps: Positive = 1e-5
    """Added to the deviation."""


class Levels(Choice):
    """Shift and scale by moments over the step, over each prompt's samples, or not."""

    name: Literal["levels"] = "levels"
    mean: Level | None = "batch"
    """What the mean is taken over; null does not shift."""
    std: Level | None = "batch"
    """What the deviation is taken over; null does not scale."""
    leave_one_out: bool = False
    """Leave a sample out of the mean that it is compared with."""
    unbiased: bool = True
    """Take one off the number of tokens in the variance."""
    eps: Positive = 1e-5
    """Added to the deviation."""


Normaliser = Annotated[Usual | Whiten | GroupedTokens | Levels | Own, Chosen(Usual)]


class Normalise(Section):
    """What is normalised over the samples of a step, on all ranks."""

    advantages: Normaliser = Usual()
    """The advantages of the update; the returns of a critic never are."""
    rewards: bool = False
    """Scale the rewards of the tokens to variance 1, without a shift, before advantages are made of them."""
