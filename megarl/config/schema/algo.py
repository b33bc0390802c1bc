"""The algorithm of a run on rollouts. The options of named choices come from ``megarl/algos``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from megarl.algos import registry
from megarl.bounds import Count, Natural, NotNegative, Positive, RejectionStatistic
from megarl.config.schema.base import Interval, Section
from megarl.config.schema.choices import Choice, CustomFunction, OneOf


class CustomAdvantage(CustomFunction):
    """A function of your own."""

    level: Literal["sample", "token"] = "sample"
    """sample: advantages of samples, from their scores; token: of tokens, from their rewards."""


class AutoNormaliser(Choice):
    """auto follows the advantage's source: whiten for gae, vapo, reinforce_pp and
    reinforce_pp_baseline, whiten with ddof 1 for gdpo, none for the others. none leaves the
    advantages as they are."""

    name: Literal["auto", "none"] = "auto"


class MaskMissingEnd(Choice):
    """The actor does not learn from it."""

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
    """Normalization over the samples of a step, on all ranks."""

    advantages: Annotated[Choice, NORMALISERS] = NORMALISERS("auto")
    """How the actor's advantages are normalised; the critic's returns never are."""
    rewards: bool = False
    """Scale the token rewards to variance 1, without a shift, before the advantages."""


class ReferenceSync(Section):
    """Moves the reference: reference = weight * actor + (1 - weight) * reference."""

    every: Count
    """Steps between two updates of the reference."""
    weight: Annotated[float, Field(gt=0, le=1)] = 0.6
    """Weight of the actor. In bfloat16, rounding holds the reference where the actor is less than 1
    / (2 * weight) units in the last place away."""


class KL(Section):
    """The KL penalty for moving away from the reference."""

    model_config = ConfigDict(validate_by_alias=True, serialize_by_alias=True)

    placement: Literal["reward", "loss"] = Field(default="reward", alias="in")
    """Where the penalty acts: subtracted from the reward of each token, or added to the loss."""
    estimator: Annotated[Choice, KL_ESTIMATORS] = KL_ESTIMATORS("k1")
    """How the divergence is estimated."""
    coef: NotNegative = 0.0
    """Weight of the penalty, reward or loss per nat; 0 is none, and needs no reference."""
    target: Positive | None = None
    """Mean divergence to which coef adapts, nats of the unit; null keeps coef."""
    horizon: Positive = 10000.0
    """Samples over which coef adapts: a step of n changes it by 20 % * n / horizon at most."""
    unit: Literal["sequence_sum", "token_mean"] = "sequence_sum"
    """What target bounds: the divergence's sum, or its mean, over the tokens of a response."""
    cumulative: bool = True
    """With in: reward and an advantage of samples, whether a token's advantage has the penalties of
    all tokens from it on, or its own alone."""
    importance: bool = False
    """With in: loss, multiply the estimate by the ratio of the new policy to the old."""
    reference_sync: ReferenceSync | None = None
    """Move the reference towards the actor; null keeps it as it is."""

    @property
    def reads_distributions(self) -> bool:
        """Whether the update reads the reference's distributions, not only the sampled tokens."""
        return self.placement == "loss" and self.coef > 0 and self.estimator.name == "full"


class TruncateAt(Section):
    """Score a response as if it ended with the first such token; all its tokens are trained on."""

    token: Natural
    """Token id."""
    after: Natural = 0
    """Tokens at the start of the response in which it does not end."""


class Scores(Section):
    """How the score of a response is shaped before advantages are computed."""

    clip: Interval | None = None
    """Bounds of scores, [lower, upper], or a number for both sides of 0; null does not clip."""
    missing_end: Annotated[Choice, MISSING_ENDS] | None = None
    """How unfinished responses are scored: cut off at the length limit, or without truncate_at's
    token."""
    truncate_at: TruncateAt | None = None
    """Score responses up to a token; null scores them whole."""
    placement: Literal["last_valid", "every_valid"] = "last_valid"
    """The tokens that get the score as their reward: the last one of the response, or each."""


class Reject(Section):
    """Bounds of the ratio of the old policy to the engines', for tokens or responses."""

    statistic: RejectionStatistic
    """What is bounded: an estimate of the divergence per token, or its sum, mean or largest over a
    response. k1 is log p(engines) - log p(old)."""
    upper: Positive
    """Upper bound: of exp(k1), or of k2 or k3, nats."""
    lower: Positive | None = None
    """Lower bound of exp(k1); null is 1 / upper."""


class SequenceMask(Section):
    """Leaves responses with a negative advantage that became less likely out of the policy loss."""

    delta: NotNegative = 1e-4
    """Largest mean of log p(engines) - log p(actor) over a response, nats."""


class M2PO(Section):
    """The tokens with the largest squared log-ratios are not trained on."""

    threshold: Positive = 0.04
    """Largest mean of the squared log-ratios of the others, nats squared."""


class Correction(Section):
    """Corrections for rollouts sampled with other numerics or older weights."""

    old_logprobs: Literal["recompute", "rollout", "loglinear", "linear"] = "recompute"
    """Old log-probabilities of the ratio. recompute: the trainer's before the update, from a
    forward pass unless a step is one optimizer step; rollout: the engines'; loglinear and linear:
    between the engines' and the actor's, by the age of the weights."""
    weights: Annotated[Choice, ROLLOUT_WEIGHTS] | None = None
    """Importance weights p(old) / p(engines) that multiply the policy loss; null uses none."""
    reject: tuple[Reject, ...] = Field(default=(), strict=False)
    """Tokens or responses outside any of these bounds are dropped from the whole loss."""
    sequence_mask: SequenceMask | None = None
    """Drop responses that became less likely by more than delta; null keeps all."""
    m2po: M2PO | None = None
    """Drop the tokens with the largest squared log-ratios from the whole loss; null drops none."""

    @property
    def interpolates(self) -> bool:
        """Whether the update interpolates between the engines' log-probabilities and its own."""
        return self.old_logprobs in ("loglinear", "linear")


class Selection(Section):
    """The samples of a step that are trained on."""

    by: Annotated[Choice, SELECTIONS] = SELECTIONS("local")
    """How samples are selected by their scores."""
    discard_unfinished: bool = False
    """Never select responses that the length limit ended."""
    min_score: float | None = None
    """Never select responses with a lower score; null selects any."""


class EarlyStop(Section):
    """Skip the remaining epochs of a step once one has moved the policy too far."""

    kl: Positive
    """Target for the mean of log p(old) - log p(new) over an epoch, nats per token."""
    factor: Annotated[float, Field(ge=1)] = 1.5
    """Too far is more than this many times the target."""


class Algo(Section):
    """PPO: ppo_epochs passes over a step's samples, each with mini_batches optimizer steps."""

    advantage: Annotated[Choice, ADVANTAGES] = ADVANTAGES("gae")
    """How advantages are computed from the rewards of a step."""
    normalise: Normalise = Normalise()
    """Normalization over a step."""
    policy_loss: Annotated[Choice, POLICY_LOSSES] = POLICY_LOSSES("ppo")
    """The actor's loss per token."""
    value_loss: Annotated[Choice, VALUE_LOSSES] = VALUE_LOSSES("mse")
    """The critic's loss per token."""
    aggregation: Annotated[Choice, AGGREGATIONS] = AGGREGATIONS("token_mean")
    """How the losses of tokens become one loss."""
    kl: KL = KL()
    """The KL penalty for moving away from the reference."""
    entropy_coef: NotNegative = 0.0
    """Weight of the entropy bonus, loss per nat."""
    scores: Scores = Scores()
    """How the score of a response is shaped before advantages are computed."""
    correction: Correction = Correction()
    """Corrections for rollouts sampled with other numerics or older weights."""
    filter: Annotated[Choice, FILTERS] | None = None
    """Filter of prompts: further prompts are sampled until the step is full; null keeps all."""
    filter_rounds: Count = 10
    """Most rounds of generation with a filter; then rejected prompts fill the step, in order."""
    select: Selection | None = None
    """Train on a selection of a step's samples; null trains on all."""
    early_stop: EarlyStop | None = None
    """Skip the remaining epochs of a step once one has moved the policy too far; null does not."""
    ppo_epochs: Count = 1
    """Passes over a step's samples."""
    mini_batches: Count = 1
    """Optimizer steps in a pass; divides the samples of a step, and with select is at most the
    selected ones."""

    @property
    def from_token_rewards(self) -> bool:
        """Whether advantages come from token rewards; the others compare the scores of samples."""
        if isinstance(self.advantage, CustomAdvantage):
            return self.advantage.level == "token"
        return self.advantage.name in registry.TOKEN_ADVANTAGES

    @property
    def needs_critic(self) -> bool:
        """Whether the advantages read the values of a critic."""
        return self.advantage.name in ("gae", "vapo")

    @property
    def loss_reads(self) -> frozenset[str]:
        """The inputs that the policy loss names in its signature."""
        return registry.POLICY_LOSSES.reads(self.policy_loss.name)

    @property
    def is_likelihood(self) -> bool:
        """Whether the policy loss is the likelihood of samples, at temperature 1, without a
        ratio."""
        return self.policy_loss.name == "sft"

    @property
    def update_reads_old_logprobs(self) -> bool:
        """Whether an optimizer step compares its policy with the one before the update."""
        return "old_logprobs" in self.loss_reads or (self.kl.importance and self.kl.placement == "loss")

    @property
    def reads_old_logprobs(self) -> tuple[str, ...]:
        """The settings that read the trainer's log-probabilities before the update."""
        correction = self.correction
        in_update = self.update_reads_old_logprobs
        reads = {
            "algo.ppo_epochs": self.ppo_epochs > 1 and in_update,
            "algo.mini_batches": self.mini_batches > 1 and in_update,
            "algo.kl": self.kl.coef > 0 and self.kl.placement == "reward",
            "algo.correction.weights": correction.weights is not None,
            "algo.correction.reject": bool(correction.reject),
            "algo.correction.m2po": correction.m2po is not None,
        }
        return tuple(name for name, read in reads.items() if read)

    @property
    def has_logprob_pass(self) -> bool:
        """Whether the actor computes log-probabilities before the update, in a pass of its own."""
        return self.correction.old_logprobs == "recompute" and bool(self.reads_old_logprobs)

    @property
    def old_logprobs_from_update(self) -> bool:
        """Whether the old log-probabilities are those of a step's only optimizer step."""
        recomputes = self.correction.old_logprobs == "recompute"
        return recomputes and self.update_reads_old_logprobs and not self.reads_old_logprobs

    @property
    def normaliser(self) -> Choice | None:
        """The normaliser of the advantages, with auto looked up; None without one."""
        chosen = self.normalise.advantages
        if not isinstance(chosen, AutoNormaliser):
            return chosen
        if chosen.name == "none":
            return None
        return _AUTO_NORMALISERS.get(self.advantage.name)
