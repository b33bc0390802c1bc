"""Losses that train a policy on preferences without a reward model.

A loss names the inputs that it reads, by keyword, of pairs of responses to the same prompts:

    chosen: [P] float32, log-probability of the whole chosen response under the policy, nats; carries
        the gradient.
    rejected: [P], that of the rejected response; carries the gradient.
    ref_chosen: [P], log-probability of the chosen response under the reference.
    ref_rejected: [P], that of the rejected response.
    chosen_tokens: [P], number of tokens of the chosen response.
    rejected_tokens: [P], that of the rejected response.

or of single responses, each of which is desirable or not:

    logprobs: [P], log-probability of the whole response under the policy; carries the gradient.
    ref_logprobs: [P], that under the reference.
    tokens: [P], number of tokens of the response.
    desirable: [P], 1 or 0.
    kl: [1], estimate of the KL divergence of the policy from the reference over the step's prompts,
        nats, at least 0: the mean log-ratio of responses to other prompts of the step.

The loss is the mean of its values over all pairs, or responses, of the step. Only a loss that names
an input of the reference needs one.

Every loss of pairs reports the implicit rewards ``chosen`` and ``rejected``, their ``margin``, and
``accuracy``, 1 where that of the chosen response is higher. ``kto`` reports the implicit
``reward``, ``accuracy``, 1 where a desirable response has a reward above beta * kl, or another one
below it, and ``kl``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from megarl.algos.policy_loss import LossTerms
from megarl.bounds import BelowHalf, NotNegative, Positive


def dpo(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: Positive = 0.1,
    label_smoothing: BelowHalf = 0.0,
) -> LossTerms:
    """The negative log-likelihood of the preferences under the policy's implicit rewards.

    The implicit reward of a response is r = beta * (log p - log p_ref); with m = r_chosen -
    r_rejected, l = -(1 - s) log sigmoid(m) - s log sigmoid(-m).
    Source: Rafailov et al., "Direct preference optimization" (2023); smoothing: Mitchell, "A note
    on DPO with noisy preferences" (2023).

    Args:
        beta: strength of the pull towards the reference.
        label_smoothing: probability s that a preference is the wrong way round.
    """
    rewards = beta * (chosen - ref_chosen), beta * (rejected - ref_rejected)
    margin = rewards[0] - rewards[1]
    values = -functional.logsigmoid(margin)
    if label_smoothing:
        values = (1 - label_smoothing) * values - label_smoothing * functional.logsigmoid(-margin)
    return _terms(values, *rewards)


def hinge(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: Positive = 0.1
) -> LossTerms:
    """The hinge of the difference of implicit rewards.

    l = max(0, 1 - m), with m as in ``dpo``. Source: Liu et al., "Statistical rejection sampling
    improves preference optimization" (2023), after SLiC (Zhao et al., 2023).

    Args:
        beta: scale of the implicit rewards; pairs whose margin exceeds 1 have no gradient.
    """
    rewards = beta * (chosen - ref_chosen), beta * (rejected - ref_rejected)
    return _terms(functional.relu(1 - (rewards[0] - rewards[1])), *rewards)


def ipo(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    chosen_tokens: Tensor,
    rejected_tokens: Tensor,
    *,
    beta: Positive = 0.1,
    per_token: bool = True,
) -> LossTerms:
    """The squared distance of a pair's log-ratio from the margin 1 / (2 beta).

    l = (h - 1 / (2 beta))^2 with h = (log p - log p_ref)(chosen) - (log p - log p_ref)(rejected), means
    per token or sums.
    Source: Azar et al., "A general theoretical paradigm to understand learning from human
    preferences" (2023).

    Args:
        beta: regularization; the smaller, the larger the margin that is aimed at.
        per_token: take the mean log-ratio of a response's tokens, as TRL does; false sums them, as
            the paper.
    """
    ratios = chosen - ref_chosen, rejected - ref_rejected
    if per_token:
        ratios = ratios[0] / chosen_tokens, ratios[1] / rejected_tokens
    values = (ratios[0] - ratios[1] - 1 / (2 * beta)).square()
    return _terms(values, beta * ratios[0], beta * ratios[1])


def simpo(
    chosen: Tensor,
    rejected: Tensor,
    chosen_tokens: Tensor,
    rejected_tokens: Tensor,
    *,
    beta: Positive = 2.0,
    gamma: NotNegative = 1.0,
) -> LossTerms:
    """The likelihood of the preferences under rewards per token, without a reference.

    r = beta * log p / tokens; l = -log sigmoid(r_chosen - r_rejected - gamma).
    Source: Meng et al., "SimPO: simple preference optimization with a reference-free reward" (2024).

    Args:
        beta: scale of the rewards.
        gamma: margin by which the chosen response's reward should be higher.
    """
    rewards = beta * chosen / chosen_tokens, beta * rejected / rejected_tokens
    return _terms(-functional.logsigmoid(rewards[0] - rewards[1] - gamma), *rewards)


def orpo(
    chosen: Tensor,
    rejected: Tensor,
    chosen_tokens: Tensor,
    rejected_tokens: Tensor,
    *,
    beta: NotNegative = 0.1,
) -> LossTerms:
    """The likelihood of the chosen response, and of a higher odds ratio for it, without a reference.

    With p the geometric mean of a response's token probabilities and odds = p / (1 - p),
    l = -log p_chosen - beta * log sigmoid(log odds_chosen - log odds_rejected).
    Source: Hong et al., "ORPO: monolithic preference optimization without reference model" (2024).

    Args:
        beta: weight of the odds ratio, lambda in the paper.
    """
    means = chosen / chosen_tokens, rejected / rejected_tokens
    odds = [mean - torch.log((-torch.expm1(mean)).clamp(min=_SMALLEST)) for mean in means]
    values = -means[0] - beta * functional.logsigmoid(odds[0] - odds[1])
    return _terms(values, beta * means[0], beta * means[1])


def cpo(
    chosen: Tensor, rejected: Tensor, chosen_tokens: Tensor, *, beta: Positive = 0.1, alpha: NotNegative = 1.0
) -> LossTerms:
    """The likelihood of the preferences under a uniform reference, and of the chosen response.

    l = -log sigmoid(beta * (log p_chosen - log p_rejected)) - alpha * log p_chosen / tokens.
    Source: Xu et al., "Contrastive preference optimization" (2024).

    Args:
        beta: scale of the implicit rewards, beta * log p.
        alpha: weight of the chosen response's mean log-probability.
    """
    rewards = beta * chosen, beta * rejected
    values = -functional.logsigmoid(rewards[0] - rewards[1]) - alpha * chosen / chosen_tokens
    return _terms(values, *rewards)


def kto(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    desirable: Tensor,
    kl: Tensor,
    *,
    beta: Positive = 0.1,
    desirable_weight: NotNegative = 1.0,
    undesirable_weight: NotNegative = 1.0,
) -> LossTerms:
    """The value of prospect theory of single responses, which need no pairs.

    With r = beta * (log p - log p_ref) and z = beta * kl, l = w_d (1 - sigmoid(r - z)) of desirable
    responses, and w_u (1 - sigmoid(z - r)) of others.
    Source: Ethayarajh et al., "KTO: model alignment as prospect theoretic optimization" (2024).

    Args:
        beta: how soon the value of a response saturates.
        desirable_weight: weight of desirable responses.
        undesirable_weight: weight of the others; the paper keeps the ratio of desirable to
            undesirable count times weight between 1 and 1.33.
    """
    rewards = beta * (logprobs - ref_logprobs)
    side = 2 * desirable - 1
    weights = desirable * desirable_weight + (1 - desirable) * undesirable_weight
    above = side * (rewards - beta * kl)
    metrics = {
        "accuracy": (above > 0).to(above.dtype),
        "reward": rewards.detach(),
        "kl": kl.expand_as(rewards),
    }
    return LossTerms(values=weights * torch.sigmoid(-above), metrics=metrics)


_SMALLEST = 1e-30
"""Smallest 1 - p in odds, whose logarithm float32 has."""


def _terms(values: Tensor, chosen: Tensor, rejected: Tensor) -> LossTerms:
    """Returns the terms with the metrics of all losses, of implicit rewards [P]."""
    chosen = chosen.detach()
    rejected = rejected.detach()
    metrics = {
        "accuracy": (chosen > rejected).to(chosen.dtype),
        "margin": chosen - rejected,
        "chosen": chosen,
        "rejected": rejected,
    }
    return LossTerms(values=values, metrics=metrics)
