"""Estimators of KL(policy || reference) in nats, and the controller of its coefficient.

Each estimates from d = log policy - log reference at a token sampled from the policy (J. Schulman,
"Approximating KL divergence", 2020); elementwise, and differentiable in ``logprobs``, for a penalty
in the loss. An estimator is a function of (logprobs, ref_logprobs), with options by keyword; with
``algo.kl.importance`` it is called with (logprobs, ref_logprobs, importance):

    logprobs: any shape, nats, of the policy.
    ref_logprobs: same shape, nats, of the reference.
    importance: same shape, without a gradient: the ratio of the policy to the one that sampled the
        tokens, which multiplies the estimates before they are limited.

Options of several, where what is clamped has no gradient:

    max_log_ratio: largest size of d; None does not limit it.
    limit: largest size of the estimate; None does not limit it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megarl.bounds import BelowOne, DivergenceForm, Positive


def k1(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    importance: Tensor | None = None,
    *,
    max_log_ratio: Positive | None = None,
    limit: Positive | None = None,
) -> Tensor:
    """d: unbiased, of either sign.

    Its gradient has mean 0 over the policy's tokens: as a loss it has no effect on average.
    Source: Ziegler et al., "Fine-tuning language models from human preferences" (2019); OpenRLHF
    and AReaL limit it to 10.
    """
    return _limited(_log_ratio(logprobs, ref_logprobs, max_log_ratio), importance, limit)


def k2(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    importance: Tensor | None = None,
    *,
    max_log_ratio: Positive | None = None,
    limit: Positive | None = None,
) -> Tensor:
    """d^2 / 2: biased, never negative.

    Its gradient, d, is an unbiased estimate of the gradient of the KL. Source: Schulman (2020).
    """
    return _limited(_log_ratio(logprobs, ref_logprobs, max_log_ratio).square() / 2, importance, limit)


def k3(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    importance: Tensor | None = None,
    *,
    max_log_ratio: Positive | None = 20.0,
    limit: Positive | None = 10.0,
) -> Tensor:
    """exp(-d) - 1 + d: unbiased, never negative.

    Its gradient is 1 - exp(-d), that of KL(reference || policy) on average. Source: Schulman
    (2020); the limits are verl's and NeMo-RL's.
    """
    d = _log_ratio(logprobs, ref_logprobs, max_log_ratio)
    return _limited(torch.expm1(-d) + d, importance, limit)


def absolute(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    importance: Tensor | None = None,
    *,
    max_log_ratio: Positive | None = None,
    limit: Positive | None = None,
) -> Tensor:
    """abs(d): biased upwards, never negative.

    Its gradient is the sign of d. Source: NeMo-Aligner, whose usual estimate it is.
    """
    return _limited(_log_ratio(logprobs, ref_logprobs, max_log_ratio).abs(), importance, limit)


def k1_plus(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    importance: Tensor | None = None,
    *,
    max_log_ratio: Positive | None = None,
    limit: Positive | None = None,
) -> Tensor:
    """k2 - sg(k2) + sg(k1), where sg stops gradients: the value of k1 with the gradient of k2, which is that of the KL.

    Source: verl, "k1+".
    """
    value = k1(logprobs, ref_logprobs, importance, max_log_ratio=max_log_ratio, limit=limit)
    return _straight_through(value, k2(logprobs, ref_logprobs, importance))


def k3_plus(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    importance: Tensor | None = None,
    *,
    max_log_ratio: Positive | None = 20.0,
    limit: Positive | None = 10.0,
) -> Tensor:
    """k2 - sg(k2) + sg(k3), where sg stops gradients: the value of k3 with the gradient of k2, which is that of the KL.

    Source: verl, "k3+".
    """
    value = k3(logprobs, ref_logprobs, importance, max_log_ratio=max_log_ratio, limit=limit)
    return _straight_through(value, k2(logprobs, ref_logprobs, importance))


def full(logits: Tensor, ref_logits: Tensor, *, form: DivergenceForm = "reverse", mix: BelowOne = 0.5) -> Tensor:
    """The exact divergence of whole distributions, [...] nats; in the loss alone.

        reverse: KL(p || q) = sum over the vocabulary of p * (log p - log q)
        forward: KL(q || p)
        jsd: mix * KL(q || m) + (1 - mix) * KL(p || m), where m = mix * q + (1 - mix) * p

    The reference runs again before each optimizer step, in the actor's group and layout, and a
    hidden state per token is kept. Source: TRL 0.10, "full" (reverse); Agarwal et al., "On-policy
    distillation of language models" (2024), the generalized Jensen-Shannon divergence.

    Args:
        logits: [..., V], of the policy, divided by the temperature; may carry a gradient.
        ref_logits: [..., V], of the reference, divided by the same temperature.
        form: one of these.
        mix: weight of the reference in the mixture.
    """
    return divergence_terms(logits.log_softmax(-1), ref_logits.log_softmax(-1), form, mix).sum(-1)


def divergence_terms(logprobs: Tensor, ref_logprobs: Tensor, form: DivergenceForm, mix: float) -> Tensor:
    """Returns the terms of a divergence by vocabulary entry, [..., V]; see ``full``."""
    if form == "reverse":
        return logprobs.exp() * (logprobs - ref_logprobs)
    if form == "forward":
        return ref_logprobs.exp() * (ref_logprobs - logprobs)
    mixture = log_mixture(logprobs, ref_logprobs, mix)
    of_reference = ref_logprobs.exp() * (ref_logprobs - mixture)
    of_policy = logprobs.exp() * (logprobs - mixture)
    return mix * of_reference + (1 - mix) * of_policy


def log_mixture(logprobs: Tensor, ref_logprobs: Tensor, mix: float) -> Tensor:
    """Returns log(mix * q + (1 - mix) * p)."""
    return torch.logaddexp(ref_logprobs + math.log(mix), logprobs + math.log1p(-mix))


def _log_ratio(logprobs: Tensor, ref_logprobs: Tensor, largest: float | None) -> Tensor:
    d = logprobs - ref_logprobs
    return d if largest is None else d.clamp(-largest, largest)


def _limited(estimates: Tensor, importance: Tensor | None, limit: float | None) -> Tensor:
    weighted = estimates if importance is None else importance.detach() * estimates
    return weighted if limit is None else weighted.clamp(-limit, limit)


def _straight_through(value: Tensor, slope: Tensor) -> Tensor:
    return value.detach() + (slope - slope.detach())


class KLController:
    """The coefficient of the penalty; with a target, it adapts to the observed KL.

    coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon. A KL of NaN changes nothing.
    Source: Ziegler et al., "Fine-tuning language models from human preferences" (2019).

    Args:
        coef: coefficient at the start, reward or loss per nat.
        target: mean KL of a response, the sum over its tokens or their mean, nats;
            None keeps ``coef``.
        horizon: number of samples over which the coefficient adapts.
    """

    def __init__(self, coef: float, *, target: float | None, horizon: float) -> None:
        self.coef = coef
        self._target = target
        self._horizon = horizon

    def update(self, kl: float, samples: int) -> None:
        """Adapts the coefficient to the mean KL of a step's responses, in the unit of the target."""
        if self._target is None or math.isnan(kl):
            return
        error = min(max(kl / self._target - 1, -0.2), 0.2)
        self.coef *= 1 + error * samples / self._horizon

    def state(self) -> dict[str, float]:
        """Returns the state of a checkpoint: nothing without a target, as the coefficient is the configuration's."""
        return {} if self._target is None else {"coef": self.coef}

    def load(self, state: dict[str, float]) -> None:
        """Loads ``state()``."""
        if self._target is not None:
            self.coef = state["coef"]
