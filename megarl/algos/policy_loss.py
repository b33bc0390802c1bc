"""Policy-gradient losses.

The loss of an optimizer step is ``weighted_sum(loss.values, weights)``, added up over micro-batches
and ranks: the weights of ``aggregation`` contain the denominator. Metrics are per token too, and
reported as means over tokens.

A loss takes those of the following arguments that its signature names, by keyword, and options.
What no loss names
is not computed.

    new_logprobs: [B, R] nats, of the policy in training; carries the gradient.
    old_logprobs: [B, R] nats, of the policy in the ratio's denominator, such as a proximal one; see
        ``algo.correction.old_logprobs``.
    rollout_logprobs: [B, R] nats, by the engines that sampled.
    ref_logprobs: [B, R] nats, of the reference; needs the role reference.
    advantages: [B, R].
    values: [B, R], by the critic before the update; needs the role critic.
    entropy: [B, R] nats, of the policy in training at each token; carries its gradient.
    response_mask: [B, R] bool, True on response tokens, also on those that are dropped from the
        loss afterwards (rejected, masked or unscored).
    clip: how far the ratio may fall below 1: its lower bound is 1 - clip.
    clip_high: how far the ratio may rise above 1: its upper bound is 1 + clip_high (DAPO: 0.28);
        None takes clip.
    dual_clip: the loss of a token with a negative advantage A is at most
        dual_clip * |A|; None sets no bound.

With d = new - old, r = exp(d), d clamped to +-20 nats (not an option) without a gradient beyond.
Metrics of all losses with a ratio: ``approxkl``, d^2 / 2 nats; ``ppo_kl``, -d nats; ``clipfrac``, 1
where a clip decides; ``clipfrac_lower``, 1 where the bound of a dual clip is the loss; and the
spread of ``ratio``, r.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megarl.algos.normalization import on_mask
from megarl.bounds import AboveOne, BelowOne, Positive, RatioBounds


@dataclass(frozen=True, kw_only=True)
class LossTerms:
    """The terms of a loss, which is their weighted sum. Values off the mask are ignored and may be anything.

    Args:
        values: [B, R] by token, or [P] by pair; differentiable.
        metrics: by name, detached floats of the same shape; their means over the step are reported.
        spreads: likewise, optional; reported as ``{name}_mean``, ``{name}_var``, ``{name}_max``,
            ``{name}_min``.
    """

    values: Tensor
    metrics: Mapping[str, Tensor]
    spreads: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])


def with_term(loss: LossTerms, name: str, values: Tensor, *, coef: float) -> LossTerms:
    """l + coef * values, also a metric: a KL penalty, or with coef < 0 an entropy bonus, nats."""
    total = loss.values + coef * values if coef else loss.values
    return replace(loss, values=total, metrics={**loss.metrics, name: values.detach()})


def weighted(loss: LossTerms, weights: Tensor) -> LossTerms:
    """w * l, after any clipping; the metrics stay those of all tokens.

    Where a weight is 0, the term and its gradient are exactly 0, even if the term is NaN. Weights
    have no gradient.
    """
    kept = torch.where(weights != 0, loss.values, torch.zeros_like(loss.values))
    return replace(loss, values=kept * weights)


MAX_LOG_RATIO = 20.0


def ppo(
    new_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip: BelowOne = 0.2,
    clip_high: Positive | None = None,
    dual_clip: AboveOne | None = None,
    delta: Positive | None = None,
    ratio_clamp: RatioBounds | None = None,
) -> LossTerms:
    """PPO's clipped objective, a maximum of two terms per token.

    l = max(-A * r, -A * clamp(r, 1 - clip, 1 + clip_high)) with r = exp(new - old). With
    ``dual_clip`` c, l is at most -A * c where A < 0; with ``delta``, the first term is -A * min(r,
    delta); with ``ratio_clamp`` (low, high), r is clamped to it before all else. Source: Schulman
    et al., "Proximal policy optimization algorithms" (2017); clip_high is DAPO's (Yu et al., 2025);
    dual_clip that of Ye et al., "Mastering complex control in MOBA games" (2020); delta is TRL's
    and INTELLECT-2's; ratio_clamp ColossalChat's.

    Args:
        delta: largest ratio of the unclipped branch; None does not limit it.
        ratio_clamp: bounds of the ratio, applied before the clip; None does not clamp.
    """
    difference, advantages = _masked(new_logprobs - old_logprobs, advantages, response_mask)
    ratio = ratio_of(difference)
    if ratio_clamp is not None:
        ratio = ratio.clamp(*ratio_clamp)
    unclipped = -advantages * (ratio if delta is None else ratio.clamp(max=delta))
    clipped = -advantages * ratio.clamp(1 - clip, 1 + (clip if clip_high is None else clip_high))
    values, is_bounded = _with_dual_clip(torch.maximum(unclipped, clipped), advantages, dual_clip)
    return _loss_terms(values, difference, clipped > unclipped, is_bounded=is_bounded)


def gspo(
    new_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip: BelowOne = 3e-4,
    clip_high: Positive | None = 4e-4,
    dual_clip: AboveOne | None = None,
) -> LossTerms:
    """PPO's clipped objective with one ratio per sequence, the geometric mean of its tokens' ratios.

    l = max(-A * s, -A * clamp(s, 1 - clip, 1 + clip_high)) with s = exp(mean(new - old)) over the
    counting tokens of the response. With ``dual_clip`` c, l is at most -A * c where A < 0. Its
    aggregation is sequence_mean. Source: Zheng et al., "Group sequence policy optimization" (2025);
    with a dual clip as in OpenRLHF and AReaL.

    Metrics also: ``sequence_ratio``, s.

    Args:
        clip: how far the response's ratio may fall below 1: its lower bound is 1 - clip.
    """
    difference, advantages = _masked(new_logprobs - old_logprobs, advantages, response_mask)
    ratio = ratio_of(row_mean(difference, response_mask))
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip, 1 + (clip if clip_high is None else clip_high))
    values, is_bounded = _with_dual_clip(torch.maximum(unclipped, clipped), advantages, dual_clip)
    return _loss_terms(values, difference, clipped > unclipped, is_bounded=is_bounded, sequence_ratio=ratio)


def cispo(
    new_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip: BelowOne = 0.2,
    clip_high: Positive | None = None,
) -> LossTerms:
    """REINFORCE with a clipped importance weight: every token keeps its gradient.

    l = -w * A * new with w = clamp(exp(new - old), 1 - clip, 1 + clip_high), which has no gradient.
    Source: MiniMax, "MiniMax-M1: scaling test-time compute efficiently with lightning attention"
    (2025), where clip is 1 or more.
    """
    difference, advantages = _masked(new_logprobs - old_logprobs, advantages, response_mask)
    high = 1 + (clip if clip_high is None else clip_high)
    return _truncated_reinforce(new_logprobs, difference, advantages, low=1 - clip, high=high)


def cispo_upper(
    new_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    max_ratio: Positive = 5.0,
) -> LossTerms:
    """CISPO whose importance weight has only an upper bound.

    l = -w * A * new with w = min(exp(new - old), max_ratio), which has no gradient. Source: TRL's
    CISPO, whose ``epsilon_high`` is this bound.

    Args:
        max_ratio: the largest ratio.
    """
    difference, advantages = _masked(new_logprobs - old_logprobs, advantages, response_mask)
    return _truncated_reinforce(new_logprobs, difference, advantages, low=0.0, high=max_ratio)


def sapo(
    new_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    tau_pos: Positive = 1.0,
    tau_neg: Positive = 1.05,
) -> LossTerms:
    """A soft gate in place of the clip.

    l = -(4 / tau) * sigmoid(tau * (r - 1)) * A with r = exp(new - old) and tau = tau_pos where A >
    0, else tau_neg; at r = 1 the gradient is that of PPO. Source: Gao et al., "Soft adaptive policy
    optimization" (2025), as in verl, TRL and AReaL.

    Args:
        tau_pos: steepness of the gate where the advantage is positive.
        tau_neg: steepness elsewhere.
    """
    difference, advantages = _masked(new_logprobs - old_logprobs, advantages, response_mask)
    ratio = ratio_of(difference)
    tau = torch.where(advantages > 0, tau_pos, tau_neg).to(ratio.dtype)
    values = -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantages
    return _loss_terms(values, difference, None)


def gmpo(
    new_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip: Positive = 0.4,
    clip_high: Positive | None = None,
) -> LossTerms:
    """The geometric mean of the clipped token ratios of a sequence.

    l = -mean(A) * exp(mean(e)) over the counting tokens of the response, on each of them; with d =
    new - old, e = min(d, clamp(d, -clip, clip_high)) where A >= 0, and the maximum of the two
    elsewhere. Its aggregation is sequence_mean. Source: Zhao et al., "Geometric-mean policy
    optimization" (2025).

    Metrics also: ``sequence_ratio``, exp(mean(e)).

    Args:
        clip: the log-ratio is clipped from below at -clip.
        clip_high: the log-ratio is clipped from above at clip_high; None takes clip.
    """
    difference, advantages = _masked(new_logprobs - old_logprobs, advantages, response_mask)
    free = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    kept = free.clamp(-clip, clip if clip_high is None else clip_high)
    pessimistic = torch.where(advantages >= 0, torch.minimum(free, kept), torch.maximum(free, kept))
    ratio = row_mean(pessimistic, response_mask).exp()
    values = (-row_mean(advantages, response_mask) * ratio).expand_as(difference)
    return _loss_terms(values, difference, pessimistic != free, sequence_ratio=ratio)


def reinforce(
    new_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
) -> LossTerms:
    """The plain policy gradient, without a ratio.

    l = -A * new. Source: Williams, "Simple statistical gradient-following algorithms for
    connectionist reinforcement learning" (1992).
    """
    difference, advantages = _masked(new_logprobs - old_logprobs, advantages, response_mask)
    return _loss_terms(-advantages * new_logprobs, difference, None)


def sft(new_logprobs: Tensor) -> LossTerms:
    """The negative log-likelihood of the samples, usually those that ``algo.select`` chooses, at temperature 1.

    l = -new. It reads no advantages: ``algo.advantage`` is none. Source: reward-ranked fine-tuning
    (RAFT, Dong et al., 2023) and rejection sampling in general.
    """
    return LossTerms(values=-new_logprobs, metrics={})


def ratio_of(difference: Tensor) -> Tensor:
    """exp of log-ratios, clamped to +-20 nats."""
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def row_mean(values: Tensor, response_mask: Tensor) -> Tensor:
    """[B, 1]: the mean over each row's counting tokens, 0 in a row without one."""
    return on_mask(values, response_mask).sum(-1, keepdim=True) / response_mask.sum(-1, keepdim=True).clamp(min=1)


def _masked(difference: Tensor, advantages: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Both with 0 off the mask, so that even NaN there has no gradient."""
    return on_mask(difference, response_mask), on_mask(advantages, response_mask)


def _with_dual_clip(values: Tensor, advantages: Tensor, dual_clip: float | None) -> tuple[Tensor, Tensor | None]:
    """The values under the bound of a dual clip, and where it decides."""
    if dual_clip is None:
        return values, None
    bound = -advantages * dual_clip
    is_bounded = (advantages < 0) & (values > bound)
    return torch.where(is_bounded, bound, values), is_bounded


def _truncated_reinforce(
    new_logprobs: Tensor, difference: Tensor, advantages: Tensor, *, low: float, high: float
) -> LossTerms:
    ratio = ratio_of(difference.detach())
    weight = ratio.clamp(low, high)
    return _loss_terms(-weight * advantages * new_logprobs, difference, weight != ratio)


def _loss_terms(
    values: Tensor,
    difference: Tensor,
    is_clipped: Tensor | None,
    *,
    is_bounded: Tensor | None = None,
    sequence_ratio: Tensor | None = None,
) -> LossTerms:
    """The values with the metrics of all losses."""
    difference = difference.detach()
    ratio = ratio_of(difference)
    metrics = {
        "clipfrac": torch.zeros_like(ratio) if is_clipped is None else is_clipped.to(ratio.dtype),
        "clipfrac_lower": torch.zeros_like(ratio) if is_bounded is None else is_bounded.to(ratio.dtype),
        "approxkl": difference.square() / 2,
        "ppo_kl": -difference,
    }
    if sequence_ratio is not None:
        metrics["sequence_ratio"] = sequence_ratio.detach().expand_as(ratio)
    return LossTerms(values=values, metrics=metrics, spreads={"ratio": ratio})
