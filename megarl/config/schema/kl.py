"""The penalty for moving away from the reference, and how the reference follows."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from megarl.config.schema.base import Count, NotNegative, Positive, Section
from megarl.config.schema.choices import Choice, Chosen, Own


class Estimate(Choice):
    """Per token, nats, with d = log p(actor) - log p(reference). k1: d; k2: d^2 / 2; abs: the size of d; k1+: as k1,
    with the gradient of k2."""

    name: Literal["k1", "k2", "abs", "k1+"] = "k1"
    max_log_ratio: Positive | None = None
    """Largest size of d; null does not limit it."""
    limit: Positive | None = None
    """Largest size of the estimate; null does not limit it."""


class ExponentialEstimate(Choice):
    """k3: exp(-d) - 1 + d; k3+: as k3, with the gradient of k2."""

    name: Literal["k3", "k3+"] = "k3"
    max_log_ratio: Positive | None = 20.0
    """Largest size of d; null does not limit it."""
    limit: Positive | None = 10.0
    """Largest size of the estimate; null does not limit it."""


class FullDivergence(Choice):
    """The divergence over the whole vocabulary at each token, in the loss alone."""

    name: Literal["full"] = "full"


Estimator = Annotated[Estimate | ExponentialEstimate | FullDivergence | Own, Chosen(Estimate)]


class ReferenceSync(Section):
    """The reference follows the actor: reference = weight * actor + (1 - weight) * reference."""

    every: Count
    """Steps between two updates of the reference."""
    weight: Annotated[float, Field(gt=0, le=1)] = 0.6
    """Weight of the actor. The reference is rounded to its dtype each time: in bfloat16, with less than 0.5, it stays
    where it is while the actor is less than 1 / (2 * weight) units in the last place away."""


class KL(Section):
    """The penalty for moving away from the reference."""

    model_config = ConfigDict(validate_by_alias=True, serialize_by_alias=True)

    placement: Literal["reward", "loss"] = Field(default="reward", alias="in")
    """Where the penalty acts: reward subtracts it from the reward of each token, loss adds it to the policy loss."""
    estimator: Estimator = Estimate()
    """How the divergence is estimated."""
    coef: NotNegative = 0.0
    """Weight of the penalty, reward or loss per nat; 0 is none, and needs no reference."""
    target: Positive | None = None
    """Adapt coef so that the mean divergence comes to this, nats of the unit; null keeps it."""
    horizon: Positive = 10000.0
    """Samples over which an adaptive coef moves: a step of n samples changes it by 0.2 * n / horizon at most."""
    unit: Literal["sequence_sum", "token_mean"] = "sequence_sum"
    """What target is of, as a mean over the responses: the sum over a response's tokens, or their mean."""
    cumulative: bool = True
    """In the reward, beside a comparison of samples: a token answers for the penalties of all tokens from it on; false
    is for its own alone."""
    importance: bool = False
    """In the loss: multiply the estimate by the probability ratio of the actor to its old self."""
    reference_sync: ReferenceSync | None = None
    """Let the reference follow the actor; null keeps it as it is."""

    @property
    def of_distributions(self) -> bool:
        """Whether the update asks the reference for its distributions, and not for sampled tokens alone."""
        return self.placement == "loss" and self.coef > 0 and self.estimator.name == "full"
