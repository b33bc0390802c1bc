"""How the rewards of a step become advantages."""

from __future__ import annotations

from typing import Annotated, Literal

from megarl.config.schema.base import Fraction, NotNegative, Positive
from megarl.config.schema.choices import Choice, Chosen, Own


class GAE(Choice):
    """Generalised advantage estimation, with a critic."""

    name: Literal["gae"] = "gae"
    gamma: Fraction = 1.0
    """Discount per token."""
    lam: Fraction = 0.95
    """Decay per token; 1 is Monte Carlo, 0 one-step."""


class VAPO(Choice):
    """Decoupled generalised advantage estimation, with a critic: the decay of the returns is not the advantages'."""

    name: Literal["vapo"] = "vapo"
    gamma: Fraction = 1.0
    """Discount per token."""
    lam_value: Fraction = 1.0
    """Decay per token of the critic's returns."""
    lam_policy: Fraction | None = None
    """Decay per token of the advantages; null: 1 - 1 / (length_alpha * tokens of the response)."""
    length_alpha: Positive = 0.05
    """How the decay of the advantages grows with the response, where lam_policy is null."""


class ReinforceReturns(Choice):
    """The reward-to-go of each token: reinforce as it is, reinforce_pp (REINFORCE++) whitened."""

    name: Literal["reinforce", "reinforce_pp"] = "reinforce"
    gamma: Fraction = 1.0
    """Discount per token."""


class GRPO(Choice):
    """Among the samples of a prompt: the score minus their mean, over their deviation."""

    name: Literal["grpo"] = "grpo"
    eps: NotNegative = 1e-6
    """Added to the deviation."""
    ddof: Literal[0, 1] = 1
    """The deviation's degrees of freedom that are taken off the number of samples."""
    singleton: Literal["zero", "raw"] = "zero"
    """Advantage of a sample that is alone, its comrades being without a score: zero, or its raw score."""


class Baseline(Choice):
    """Among the samples of a prompt: the score minus a baseline. reinforce_pp_baseline and dr_grpo: their mean; rloo:
    the mean of the others; opo: the mean weighted by length."""

    name: Literal["reinforce_pp_baseline", "dr_grpo", "rloo", "opo"] = "rloo"
    singleton: Literal["zero", "raw"] = "zero"
    """Advantage of a sample that is alone, its comrades being without a score: zero, or its raw score."""


class Plain(Choice):
    """Among the samples of a prompt: the score minus a baseline. masked_rloo: the mean of the others that ended; gpg:
    the mean, times samples over samples with an advantage; remax: the score of the likeliest response."""

    name: Literal["masked_rloo", "gpg", "remax"] = "masked_rloo"


class Scaled(Choice):
    """Among the samples of a prompt, over a deviation. rloo_std: as rloo, over the deviation of the others; pass_at_k:
    the best sample alone, its lead over the second; gdpo: as grpo for each source of a score by itself, summed by
    weight."""

    name: Literal["rloo_std", "pass_at_k", "gdpo"] = "rloo_std"
    eps: NotNegative = 1e-6
    """Added to the deviation."""


class BatchStd(Choice):
    """The score minus the mean of the prompt's samples, over the deviation of all scores of the step."""

    name: Literal["batch_std"] = "batch_std"
    eps: NotNegative = 1e-6
    """Added to the deviation."""
    ddof: Literal[0, 1] = 1
    """The deviation's degrees of freedom that are taken off the number of samples."""


class OwnAdvantage(Own):
    """A function of your own."""

    level: Literal["sample", "token"] = "sample"
    """sample: it compares the samples of a step; token: it makes advantages of the rewards of tokens."""


Advantage = Annotated[
    GAE | VAPO | ReinforceReturns | GRPO | Baseline | Plain | Scaled | BatchStd | OwnAdvantage, Chosen(GAE)
]
