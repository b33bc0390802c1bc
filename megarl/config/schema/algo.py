"""The algorithm of a run on rollouts, part by part. The options of named choices are those of ``megarl/algos``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from megarl.algos import registry
from megarl.bounds import Count, Natural, NotNegative, Positive
from megarl.config.schema.base import Section
from megarl.config.schema.choices import Choice, CustomFunction, OneOf


class CustomAdvantage(CustomFunction):
    """A function of your own."""

    level: Literal["sample", "token"] = "sample"
    """sample: it compares the samples of a step; token: it makes advantages of the rewards of tokens."""


class AutoNormaliser(Choice):
    """auto is what the estimator's source does: whiten for gae, vapo, reinforce_pp, reinforce_pp_baseline and, with
    ddof 1, gdpo; none for the others. none leaves the advantages as they are."""

    name: Literal["auto", "none"] = "auto"


class MaskMissingEnd(Choice):
    """Nothing is learnt from it."""

    name: Literal["mask"] = "mask"


ADVANTAGES = OneOf(registry.TOKEN_ADVANTAGES, registry.GROUP_ADVANTAGES, CustomAdvantage, default="gae")
NORMALISERS = OneOf(AutoNormaliser, registry.NORMALISERS, CustomFunction, default="auto")
POLICY_LOSSES = OneOf(registry.POLICY_LOSSES, CustomFunction, default="ppo")
VALUE_LOSSES = OneOf(registry.VALUE_LOSSES, CustomFunction, default="mse")
AGGREGATIONS = OneOf(registry.AGGREGATIONS, CustomFunction, default="token_mean")
KL_ESTIMATORS = OneOf(registry.KL_ESTIMATORS, CustomFunction, default="k1")
MISSING_ENDS = OneOf(registry.MISSING_ENDS, MaskMissingEnd)
ROLLOUT_WEIGHTS = OneOf(registry.ROLLOUT_WEIGHTS, CustomFunction)
FILTERS = OneOf(registry.FILTERS, CustomFunction)
SELECTIONS = OneOf(registry.SELECTIONS, default="local")

_AUTO_NORMALISERS = {
    **dict.fromkeys(("gae", "vapo", "reinforce_pp", "reinforce_pp_baseline"), NORMALISERS("whiten")),
    "gdpo": NORMALISERS("whiten", ddof=1),
}
"""By advantage; the others have none."""


class Normalise(Section):
    """What is normalised over the samples of a step, on all ranks."""

    advantages: Annotated[Choice, NORMALISERS] = NORMALISERS("auto")
    """The advantages of the update; the returns of a critic never are."""
    rewards: bool = False
    """Scale the rewards of the tokens to variance 1, without a shift, before advantages are made of them."""


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
    estimator: Annotated[Choice, KL_ESTIMATORS] = KL_ESTIMATORS("k1")
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


def _around_zero(value: object) -> object:
    """A number alone is the limit on both sides."""
    return (-value, value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _rising(interval: tuple[float, float]) -> tuple[float, float]:
    if interval[0] >= interval[1]:
        raise ValueError("should rise: a number above 0, or [lower, upper]")
    return interval


Interval = Annotated[tuple[float, float], BeforeValidator(_around_zero), AfterValidator(_rising), Field(strict=False)]


class TruncateAt(Section):
    """Score a response as if it ended with the first such token; it is trained on whole."""

    token: Natural
    """Token id."""
    after: Natural = 0
    """Tokens of the response before which it does not end."""


class Scores(Section):
    """What becomes of a response's score before the algorithm sees it."""

    clip: Interval | None = None
    """Scores are clipped to [lower, upper]; a number alone is both, below and above 0. null does not clip."""
    missing_end: Annotated[Choice, MISSING_ENDS] | None = None
    """What becomes of a response that the length limit ended, or with truncate_at that lacks the token."""
    truncate_at: TruncateAt | None = None
    """Score responses up to a token; null scores them whole."""
    placement: Literal["last_valid", "every_valid"] = "last_valid"
    """The tokens whose reward has the score: the last one of the response, or each."""


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
    weights: Annotated[Choice, ROLLOUT_WEIGHTS] | None = None
    """Factors of the token losses; null is none."""
    reject: tuple[Reject, ...] = Field(default=(), strict=False)
    """Bounds that a token or its response must all keep."""
    sequence_mask: SequenceMask | None = None
    """Leave responses that the actor has moved away from out of the policy loss; null does not."""
    m2po: M2PO | None = None
    """Leave out the tokens with the largest log-ratios; null does not."""


class EarlyStop(Section):
    """Leave out the epochs that follow one in which the policy has moved too far."""

    kl: Positive
    """Aim for the mean of log p(old) - log p(new) over an epoch, nats per token."""
    factor: Annotated[float, Field(ge=1)] = 1.5
    """How many times that is too far."""


class Algo(Section):
    """PPO: each of a step's mini_batches equal parts makes one optimizer step, ppo_epochs times over."""

    advantage: Annotated[Choice, ADVANTAGES] = ADVANTAGES("gae")
    """How the rewards of a step become advantages."""
    normalise: Normalise = Normalise()
    """How advantages and rewards are normalised over a step."""
    policy_loss: Annotated[Choice, POLICY_LOSSES] = POLICY_LOSSES("ppo")
    """The actor's loss per token."""
    value_loss: Annotated[Choice, VALUE_LOSSES] = VALUE_LOSSES("mse")
    """The critic's loss per token."""
    aggregation: Annotated[Choice, AGGREGATIONS] = AGGREGATIONS("token_mean")
    """How token losses make the loss."""
    kl: KL = KL()
    """The penalty for moving away from the reference."""
    entropy_coef: NotNegative = 0.0
    """Weight of the entropy bonus, loss per nat."""
    scores: Scores = Scores()
    """What becomes of a response's score before the algorithm sees it."""
    correction: Correction = Correction()
    """What is done about rollouts of another policy than the one in training."""
    filter: Annotated[Choice, FILTERS] | None = None
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
        if isinstance(self.advantage, CustomAdvantage):
            return self.advantage.level == "token"
        return self.advantage.name in registry.TOKEN_ADVANTAGES

    @property
    def needs_critic(self) -> bool:
        """Whether the advantages are made with the values of a critic."""
        return self.advantage.name in ("gae", "vapo")

    @property
    def normaliser(self) -> Choice | None:
        """What normalises the advantages, with auto looked up; None where nothing does."""
        chosen = self.normalise.advantages
        if not isinstance(chosen, AutoNormaliser):
            return chosen
        return None if chosen.name == "none" else _AUTO_NORMALISERS.get(self.advantage.name)
