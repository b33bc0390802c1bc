"""What is done about rollouts that another policy wrote than the one in training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megarl.config.schema.base import NotNegative, Positive, Section
from megarl.config.schema.choices import Choice, Chosen, Own


class RolloutWeights(Choice):
    """Factors of the token losses: the probability ratio of the old policy to the engines'.

    token_: of each token by itself; sequence_: their product over a response; geometric_: their geometric mean.
    _truncate: at most upper; _mask: 0 beyond the bounds. geometric_mask keeps the factors of tokens within.
    """

    name: Literal[
        "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask", "geometric_truncate"
    ] = "token_truncate"
    upper: Positive = 2.0
    """Upper bound of the ratio."""
    lower: Positive | None = None
    """Lower bound of the ratio; null is none."""
    batch_normalise: bool = False
    """Scale the factors to mean 1 over the step."""


class Reject(Section):
    """Tokens or responses whose ratio of the old policy to the engines' is out of bounds are not trained on."""

    statistic: Literal[
        "token_k1",
        "token_k2",
        "token_k3",
        "sequence_sum_k1",
        "sequence_sum_k2",
        "sequence_sum_k3",
        "sequence_mean_k1",
        "sequence_mean_k2",
        "sequence_mean_k3",
        "sequence_max_k2",
        "sequence_max_k3",
    ]
    """What is bounded: an estimate of the divergence per token, or its sum, mean or largest over a response. k1 is
    log p(engines) - log p(old)."""
    upper: Positive
    """Upper bound: of exp(k1), or of k2 or k3, nats."""
    lower: Positive | None = None
    """Lower bound of exp(k1); null is 1 / upper."""


class SequenceMask(Section):
    """Responses with a negative advantage that the actor has moved away from are left out of the policy loss."""

    delta: NotNegative = 1e-4
    """Largest mean of log p(engines) - log p(actor) over a response, nats."""


class M2PO(Section):
    """The tokens with the largest squared log-ratios are not trained on."""

    threshold: Positive = 0.04
    """Largest mean of the squared log-ratios of the others, nats squared."""


class Correction(Section):
    """What is done about rollouts that another policy wrote than the one in training."""

    old_logprobs: Literal["recompute", "rollout", "loglinear", "linear"] = "recompute"
    """Where the ratio's old log-probabilities are from: computed before the update, the engines', or between the
    engines' and the actor's by the age of the weights."""
    weights: Annotated[RolloutWeights | Own, Chosen()] | None = None
    """Factors of the token losses; null is none."""
    reject: tuple[Reject, ...] = Field(default=(), strict=False)
    """Bounds that a token or its response must all keep."""
    sequence_mask: SequenceMask | None = None
    """Leave responses that the actor has moved away from out of the policy loss; null does not."""
    m2po: M2PO | None = None
    """Leave out the tokens with the largest log-ratios; null does not."""
