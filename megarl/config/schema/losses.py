"""The losses of policy and critic per token, and how token losses make a loss."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megarl.config.schema.base import BelowOne, Count, NotNegative, Positive
from megarl.config.schema.choices import Choice, Chosen, Own


class PPO(Choice):
    """The clipped surrogate, per token."""

    name: Literal["ppo"] = "ppo"
    clip: BelowOne = 0.2
    """How far below 1 the probability ratio earns."""
    clip_high: Positive | None = None
    """How far above 1; null is as far as below."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Where the advantage is negative: the loss is at most this many times its size; null does not limit it."""
    delta: Positive | None = None
    """Largest ratio of the branch that is not clipped; null does not limit it."""
    ratio_clamp: Annotated[tuple[NotNegative, Positive], Field(strict=False)] | None = None
    """Bounds that the ratio is clamped to before the clip; null does not clamp."""


class GSPO(Choice):
    """The clipped surrogate of the geometric mean of a response's ratios."""

    name: Literal["gspo"] = "gspo"
    clip: BelowOne = 3e-4
    """How far below 1 the response's ratio earns."""
    clip_high: Positive | None = 4e-4
    """How far above 1; null is as far as below."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Where the advantage is negative: the loss is at most this many times its size; null does not limit it."""


class CISPO(Choice):
    """The log-probability, weighted with the clipped ratio: clipped tokens keep their gradient."""

    name: Literal["cispo"] = "cispo"
    clip: BelowOne = 0.2
    """How far below 1 the ratio may be."""
    clip_high: Positive | None = None
    """How far above 1; null is as far as below."""


class CISPOUpper(Choice):
    """As cispo, with a largest ratio alone."""

    name: Literal["cispo_upper"] = "cispo_upper"
    max_ratio: Positive = 5.0
    """The largest ratio."""


class SAPO(Choice):
    """A soft gate on the ratio instead of a clip."""

    name: Literal["sapo"] = "sapo"
    tau_pos: Positive = 1.0
    """Steepness of the gate where the advantage is positive."""
    tau_neg: Positive = 1.05
    """Steepness of the gate where it is negative."""


class GMPO(Choice):
    """The geometric mean of a response's clipped ratios."""

    name: Literal["gmpo"] = "gmpo"
    clip: Positive = 0.4
    """How far below 0 the log of a ratio earns."""
    clip_high: Positive | None = None
    """How far above 0; null is as far as below."""


class Reinforce(Choice):
    """The log-probability, weighted with the advantage, without a ratio."""

    name: Literal["reinforce"] = "reinforce"


PolicyLoss = Annotated[PPO | GSPO | CISPO | CISPOUpper | SAPO | GMPO | Reinforce | Own, Chosen(PPO)]


class SquaredError(Choice):
    """The squared error of the value, clipped around its old one."""

    name: Literal["mse"] = "mse"
    clip: Positive | None = 0.2
    """Half width of the interval in which a value may move in one step; null does not clip."""
    scale: Positive = 0.5
    """Factor of the loss."""


class Huber(Choice):
    """The squared error up to delta and linear beyond, clipped around the old value."""

    name: Literal["huber"] = "huber"
    clip: Positive | None = 0.2
    """Half width of the interval in which a value may move in one step; null does not clip."""
    scale: Positive = 0.5
    """Factor of the loss."""
    delta: Positive = 10.0
    """Error from which the loss is linear."""


ValueLoss = Annotated[SquaredError | Huber | Own, Chosen(SquaredError)]


class Aggregate(Choice):
    """Over an optimizer step: token_mean and token_sum weigh every response token alike; sequence_mean takes the mean
    over the responses of the mean over their tokens, sequence_sum that of the sum over their tokens."""

    name: Literal["token_mean", "token_sum", "sequence_mean", "sequence_sum"] = "token_mean"


class NormalisedSum(Choice):
    """The mean over the responses of the sum over their tokens, divided by a constant."""

    name: Literal["sequence_sum_norm"] = "sequence_sum_norm"
    tokens: Count
    """The constant: the longest response, for example."""


Aggregation = Annotated[Aggregate | NormalisedSum | Own, Chosen(Aggregate)]
