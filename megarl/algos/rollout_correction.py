"""Corrections for the difference between the policy that sampled a response and the one that is trained.

The engines compute with other numerics and, with ``rollout.max_staleness`` above 0 or
``rollout.sync_every`` above 1, with older weights. The loss of a token is made in this order:

1. l = policy_loss(new, old, A), where ``old_logprobs`` of the configuration selects old.
2. l is multiplied by ``weights``, and by 0 where ``sequence_mask`` drops the response.
3. The KL penalty (with ``algo.kl.in: loss``) and the entropy bonus are added; steps 1
and 2 do not affect them.
4. Tokens dropped by ``reject`` or ``m2po`` leave the whole sum, KL and entropy included.

Corrections change neither the advantages, nor the critic's loss, nor the denominators of
``algo.aggregation``. Throughout, d = old - rollout in nats per token, clamped to +-20, and

    old_logprobs: [B, R] nats, by the trainer before the update.
    rollout_logprobs: [B, R] nats, by the engine that sampled.
    response_mask: [B, R] bool.
    reduce: over the ranks that share the step; see ``normalization.Reduce``.

Weights multiply the policy loss after clipping, and carry no gradient.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from megarl.algos.kl import k1
from megarl.algos.normalization import Reduce, on_mask
from megarl.algos.policy_loss import MAX_LOG_RATIO, ratio_of, row_mean
from megarl.bounds import Positive, RejectionStatistic


def rollout_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    response_mask: Tensor,
    reduce: Reduce,
    *,
    level: Literal["token", "sequence", "geometric"],
    rule: Literal["truncate", "mask"],
    upper: Positive = 2.0,
    lower: Positive | None = None,
    batch_normalise: bool = False,
) -> Tensor:
    """Importance weights of the token losses: the probability ratio r of the old policy to the engines', of each token,
    of the sequence, or its geometric mean over the sequence; truncated at its bounds,
    or 0 beyond them.

    token: r is exp(d) of each token; sequence: exp(sum of d) over the response; geometric: exp(mean
    of d) over the response. truncate: w = clamp(r, lower, upper), which trades the variance of the
    tail for bias; mask: w = r where lower <= r <= upper, else 0; geometric_mask drops responses by
    r, and the others keep exp(d) of each token.

    Source: token_truncate is TIS of Yao et al., "Your efficient RL framework secretly brings you
    off-policy RL training" (2025), as in verl and OpenRLHF; token_mask IcePop (Ling team, "Every
    step evolves", 2025), and with an upper bound alone the behaviour cap of AReaL's decoupled PPO
    (Fu et al., 2025), where it is 5; sequence_truncate verl's; sequence_mask TRL's, with upper 3;
    geometric_truncate AReaL's rejection settings at the level of sequences; geometric_mask
    OpenRLHF's seq-mask-tis.

    Args:
        upper: upper bound of the ratio.
        lower: lower bound of the ratio; None is none.
        batch_normalise: scale the weights to mean 1 over the tokens of the step, or over its
            responses where a response has one weight; dropped ones count as 0.
    """
    difference = old_logprobs - rollout_logprobs
    match level:
        case "token":
            ratio = ratio_of(difference)
        case "sequence":
            ratio = ratio_of(on_mask(difference, response_mask).sum(-1, keepdim=True))
        case "geometric":
            ratio = ratio_of(row_mean(difference, response_mask))
    if rule == "truncate":
        weights = ratio.clamp(lower, upper)
    else:
        weights = (ratio_of(difference) if level == "geometric" else ratio) * _within(ratio, lower, upper)
    if batch_normalise:
        by_token = level == "token" or (level, rule) == ("geometric", "mask")
        counted = weights[response_mask if by_token else response_mask.any(-1, keepdim=True)].double()
        number, total = reduce(torch.stack([counted.new_tensor(counted.numel()), counted.sum()])).unbind()
        mean = total / number.clamp(min=1)
        weights = weights / torch.where(mean > 0, mean, torch.ones_like(mean)).to(weights.dtype)
    return on_mask(weights.expand_as(response_mask), response_mask).detach()


def rejection(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    response_mask: Tensor,
    *,
    statistic: RejectionStatistic,
    upper: float,
    lower: float | None = None,
) -> Tensor:
    """The tokens in a hard trust region around the rollout policy, whose statistic is within its bounds; [B, R] bool.

    With d = old - rollout, per token k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d; of a sequence
    their sum, mean or maximum over its tokens, which are kept or dropped together. k2 and k3 must
    be at most ``upper``; the bounds of k1 are bounds of exp(-d), that is log(lower) <= k1 <=
    log(upper), where ``lower`` None is 1 / upper. Several regions keep the tokens that are in all
    of them. Source: verl's rollout rejection.
    """
    level, _, kind = statistic.rpartition("_")
    difference = (old_logprobs - rollout_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    per_token = {"k1": -difference, "k2": difference.square() / 2, "k3": torch.expm1(difference) - difference}[kind]
    counted = on_mask(per_token, response_mask)
    match level:
        case "token":
            values = per_token
        case "sequence_sum":
            values = counted.sum(-1, keepdim=True)
        case "sequence_mean":
            values = row_mean(per_token, response_mask)
        case _:
            values = torch.nn.functional.pad(counted, (0, 1)).amax(-1, keepdim=True)
    if kind != "k1":
        return (values <= upper) & response_mask
    return _within(values.exp(), 1 / upper if lower is None else lower, upper) & response_mask


def off_policy_sequences(
    new_logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, response_mask: Tensor, *, delta: float = 1e-4
) -> Tensor:
    """The sequences that off-policy sequence masking keeps, [B, 1] bool.

    A row is dropped where A < 0 and mean(rollout - new) > delta over its counting tokens, nats,
    with the log-probabilities new of the policy in training: it should become less likely, and
    already has. Advantages have one sign per row. Source: DeepSeek-V3.2 (2025), as in
    TRL and slime.
    """
    distance = row_mean(k1(rollout_logprobs, new_logprobs.detach()), response_mask)
    return ~((row_mean(advantages, response_mask) < 0) & (distance > delta))


def proximal_weights(versions: Tensor, current_version: int) -> Tensor:
    """Where each token's proximal policy lies between the one that sampled it (0) and the one in training (1), [B, R].

    alpha = clamp((n - 1 - v) / (n - v), 0, 1) with n the current version and v the token's: the
    proximal policy is one version behind. Source: AReaL's approximation of the proximal policy
    without a forward pass.

    Args:
        versions: [B, R], the policy version that sampled each token; negative for
            none, whose alpha is 0.
        current_version: version of the policy after the update, one more than the engines can have.
    """
    behind = (current_version - versions).to(torch.get_default_dtype())
    alpha = (behind - 1) / behind.clamp(min=1)
    return torch.where(versions < 0, torch.zeros_like(alpha), alpha.clamp(0, 1))


def proximal_logprobs(
    rollout_logprobs: Tensor, new_logprobs: Tensor, alpha: Tensor, *, method: Literal["loglinear", "linear"]
) -> Tensor:
    """Log-probabilities of the proximal policy, without a gradient, interpolated by the ``proximal_weights`` alpha.

    loglinear: rollout + alpha * (new - rollout); linear: log((1 - alpha) * exp(rollout) + alpha *
    exp(new)), where new is of the policy in training. Source: AReaL.
    """
    new = new_logprobs.detach()
    if method == "loglinear":
        return rollout_logprobs + alpha * (new - rollout_logprobs)
    return torch.logaddexp(torch.log1p(-alpha) + rollout_logprobs, alpha.log() + new)


_DIGIT_BITS = 8
_BUCKETS = 2**_DIGIT_BITS


def m2po(
    old_logprobs: Tensor, rollout_logprobs: Tensor, response_mask: Tensor, reduce: Reduce, *, threshold: float = 0.04
) -> Tensor:
    """Drops the tokens of the step with the largest squared log-ratios until their mean is below ``threshold``, nats^2.

    With x = (rollout - old)^2, it keeps the most tokens with the smallest x whose mean is below the
    threshold, and at least the smallest. Tokens with equal x stay or go together, so that nothing
    depends on their order or on the ranks. Calls ``reduce`` eight times at most. Source: Zheng et
    al., "Prosperity before collapse: how far can off-policy RL reach with stale data on LLMs?"
    (2025), as in AReaL.
    """
    squares = (rollout_logprobs.double() - old_logprobs.double()).square()
    first_out, none_smaller = _first_out(squares[response_mask], reduce, threshold)
    return response_mask & (squares <= first_out if none_smaller else squares < first_out)


def _first_out(values: Tensor, reduce: Reduce, threshold: float) -> tuple[float, bool]:
    """The smallest value at which the mean of all values up to it reaches the threshold, and whether it is the minimum.

    The mean of the n smallest grows with n: there is one such value, or none (infinity). It is a
    radix search over the bits of the floats, which sort like the numbers as none is negative: each
    round adds up, by their next digit, the values that agree with the digits found so far.
    """
    bits = values.view(torch.int64)
    known = 0
    smaller = values.new_zeros(2)
    for shift in range(64 - _DIGIT_BITS, -1, -_DIGIT_BITS):
        matching = (bits >> _DIGIT_BITS >> shift) == known
        digits = (bits[matching] >> shift) & (_BUCKETS - 1)
        counts = torch.bincount(digits, minlength=_BUCKETS).double()
        sums = torch.bincount(digits, weights=values[matching], minlength=_BUCKETS)
        buckets = reduce(torch.cat([counts, sums])).view(2, _BUCKETS)
        numbers, totals = smaller[:, None] + buckets.cumsum(1)
        occupied = buckets[0] > 0
        reached = occupied & (totals >= threshold * numbers)
        if reached.any():
            first = int(reached.nonzero()[0])
        elif shift == 64 - _DIGIT_BITS:
            return math.inf, False
        else:
            first = int(occupied.nonzero()[-1])  # rounding: the coarser bucket reached the threshold
        smaller = smaller + buckets[:, :first].sum(1)
        known = known << _DIGIT_BITS | first
    return float(torch.tensor(known).view(torch.float64)), not bool(smaller[0])


def _within(values: Tensor, lower: float | None, upper: float) -> Tensor:
    above = values <= upper
    return above if lower is None else above & (values >= lower)
