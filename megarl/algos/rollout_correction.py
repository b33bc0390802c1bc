"""Weights and masks for samples of a policy that is not quite the one in training: a stale one, or the engine's.

Throughout, d = old - rollout in nats per token, clamped to +-``log_clamp``, and

    old_logprobs: [B, R] nats, by the trainer before the update: of the policy that the ratio of the loss is about.
    rollout_logprobs: [B, R] nats, by the engine that sampled.
    response_mask: [B, R] bool.
    reduce: over the ranks that share the step; see ``normalisation.Reduce``.

Weights multiply the terms of the policy loss after clipping (``terms.weighted``), and carry no gradient. What is
dropped stays in the denominators of the loss.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megarl.algos.kl import k1
from megarl.algos.normalization import Reduce, on_mask
from megarl.algos.policy_loss import MAX_LOG_RATIO, row_mean

Statistic = Literal[
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


def token_truncate(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    response_mask: Tensor,
    reduce: Reduce,
    *,
    upper: float = 2.0,
    lower: float | None = None,
    batch_normalise: bool = False,
    log_clamp: float = MAX_LOG_RATIO,
) -> Tensor:
    """Truncated importance weights per token: the variance of the tail is traded for bias.

    w = clamp(exp(old - rollout), lower, upper). Source: Yao et al., "Your efficient RL framework secretly brings you
    off-policy RL training" (2025), TIS, as in verl and OpenRLHF.

    Args:
        old_logprobs, rollout_logprobs, response_mask, reduce: see the module.
        upper: largest weight.
        lower: smallest weight; None: as it is.
        batch_normalise: divide by the mean over the tokens of the step.
        log_clamp: most |d|, nats.

    Returns:
        [B, R], 0 off the mask.
    """
    ratio = (old_logprobs - rollout_logprobs).clamp(-log_clamp, log_clamp).exp()
    return _weights(ratio.clamp(lower, upper), response_mask, response_mask, reduce, batch_normalise)


def token_mask(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    response_mask: Tensor,
    reduce: Reduce,
    *,
    upper: float = 2.0,
    lower: float | None = None,
    batch_normalise: bool = False,
    log_clamp: float = MAX_LOG_RATIO,
) -> Tensor:
    """Importance weights per token, tokens beyond the bounds dropped.

    w = exp(old - rollout) where that is within lower and upper, else 0. Source: IcePop (Ling team, "Every step
    evolves", 2025); with an upper bound alone the behaviour cap of AReaL's decoupled PPO (Fu et al., 2025), where it is
    5.

    Args:
        old_logprobs, rollout_logprobs, response_mask, reduce: see the module.
        upper: largest weight that stays.
        lower: smallest weight that stays; None: any.
        batch_normalise: divide by the mean over the tokens of the step, those dropped included.
        log_clamp: most |d|, nats.

    Returns:
        [B, R], 0 off the mask.
    """
    ratio = (old_logprobs - rollout_logprobs).clamp(-log_clamp, log_clamp).exp()
    return _weights(ratio * _within(ratio, lower, upper), response_mask, response_mask, reduce, batch_normalise)


def sequence_truncate(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    response_mask: Tensor,
    reduce: Reduce,
    *,
    upper: float = 2.0,
    lower: float | None = None,
    batch_normalise: bool = False,
    log_clamp: float = MAX_LOG_RATIO,
) -> Tensor:
    """Truncated importance weights of whole sequences, on each of their tokens.

    w = clamp(exp(sum(old - rollout)), lower, upper), the sum over the response. Source: verl's sequence-level truncated
    importance sampling.

    Args:
        old_logprobs, rollout_logprobs, response_mask, reduce: see the module.
        upper: largest weight.
        lower: smallest weight; None: as it is.
        batch_normalise: divide by the mean over the sequences of the step.
        log_clamp: most |sum of d|, nats.

    Returns:
        [B, R], 0 off the mask.
    """
    ratio = _row_sum(old_logprobs - rollout_logprobs, response_mask).clamp(-log_clamp, log_clamp).exp()
    has_tokens = response_mask.any(-1, keepdim=True)
    return _weights(ratio.clamp(lower, upper), has_tokens, response_mask, reduce, batch_normalise)


def sequence_mask(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    response_mask: Tensor,
    reduce: Reduce,
    *,
    upper: float = 2.0,
    lower: float | None = None,
    batch_normalise: bool = False,
    log_clamp: float = MAX_LOG_RATIO,
) -> Tensor:
    """Importance weights of whole sequences, sequences beyond the bounds dropped.

    w = exp(sum(old - rollout)), the sum over the response, where that is within lower and upper, else 0. Source: TRL's
    sequence_mask, with upper 3.

    Args:
        old_logprobs, rollout_logprobs, response_mask, reduce: see the module.
        upper: largest weight that stays.
        lower: smallest weight that stays; None: any.
        batch_normalise: divide by the mean over the sequences of the step, those dropped included.
        log_clamp: most |sum of d|, nats.

    Returns:
        [B, R], 0 off the mask.
    """
    ratio = _row_sum(old_logprobs - rollout_logprobs, response_mask).clamp(-log_clamp, log_clamp).exp()
    has_tokens = response_mask.any(-1, keepdim=True)
    return _weights(ratio * _within(ratio, lower, upper), has_tokens, response_mask, reduce, batch_normalise)


def geometric_truncate(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    response_mask: Tensor,
    reduce: Reduce,
    *,
    upper: float = 2.0,
    lower: float | None = None,
    batch_normalise: bool = False,
    log_clamp: float = MAX_LOG_RATIO,
) -> Tensor:
    """The truncated geometric mean of a sequence's ratios, on each of its tokens.

    w = clamp(exp(mean(old - rollout)), lower, upper), the mean over the response. Source: AReaL's rejection settings at
    the level of sequences.

    Args:
        old_logprobs, rollout_logprobs, response_mask, reduce: see the module.
        upper: largest weight.
        lower: smallest weight; None: as it is.
        batch_normalise: divide by the mean over the sequences of the step.
        log_clamp: most |mean of d|, nats.

    Returns:
        [B, R], 0 off the mask.
    """
    ratio = row_mean(old_logprobs - rollout_logprobs, response_mask).clamp(-log_clamp, log_clamp).exp()
    has_tokens = response_mask.any(-1, keepdim=True)
    return _weights(ratio.clamp(lower, upper), has_tokens, response_mask, reduce, batch_normalise)


def geometric_mask(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    response_mask: Tensor,
    reduce: Reduce,
    *,
    upper: float = 2.0,
    lower: float | None = None,
    batch_normalise: bool = False,
    log_clamp: float = MAX_LOG_RATIO,
) -> Tensor:
    """Importance weights per token, of sequences whose geometric mean ratio is within the bounds.

    w = exp(old - rollout) where exp(mean(old - rollout)), the mean over the response, is within lower and upper, else
    0. Source: OpenRLHF's seq-mask-tis.

    Args:
        old_logprobs, rollout_logprobs, response_mask, reduce: see the module.
        upper: largest geometric mean that stays.
        lower: smallest geometric mean that stays; None: any.
        batch_normalise: divide by the mean over the tokens of the step, those dropped included.
        log_clamp: most |d| and |mean of d|, nats.

    Returns:
        [B, R], 0 off the mask.
    """
    difference = old_logprobs - rollout_logprobs
    ratio = difference.clamp(-log_clamp, log_clamp).exp()
    of_rows = row_mean(difference, response_mask).clamp(-log_clamp, log_clamp).exp()
    return _weights(ratio * _within(of_rows, lower, upper), response_mask, response_mask, reduce, batch_normalise)


def rejection(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    response_mask: Tensor,
    *,
    statistic: Statistic,
    upper: float,
    lower: float | None = None,
    log_clamp: float = MAX_LOG_RATIO,
) -> Tensor:
    """Which tokens a hard trust region around the rollout policy keeps: those whose statistic is within its bounds.

    With d = old - rollout, per token k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d; of a sequence their sum, mean or
    maximum over its tokens, which then stay or go together. k2 and k3 must be at most ``upper``; the bounds of k1 are
    bounds of exp(-d), that is log(lower) <= k1 <= log(upper). Several regions keep what each of them keeps. Source:
    verl's rollout rejection.

    Args:
        old_logprobs, rollout_logprobs, response_mask: see the module.
        statistic: see above.
        upper: largest k2 or k3 that stays, or largest exp(k1).
        lower: smallest exp(k1) that stays; None: 1 / upper. k2 and k3 have no lower bound.
        log_clamp: most |d|, nats.

    Returns:
        [B, R] bool, False off the mask.
    """
    level, _, kind = statistic.rpartition("_")
    difference = (old_logprobs - rollout_logprobs).clamp(-log_clamp, log_clamp)
    per_token = {"k1": -difference, "k2": difference.square() / 2, "k3": torch.expm1(difference) - difference}[kind]
    counted = on_mask(per_token, response_mask)
    match level:
        case "token":
            measured = per_token
        case "sequence_sum":
            measured = counted.sum(-1, keepdim=True)
        case "sequence_mean":
            measured = row_mean(per_token, response_mask)
        case _:
            measured = torch.nn.functional.pad(counted, (0, 1)).amax(-1, keepdim=True)
    if kind == "k1":
        measured = measured.exp()
        lower = 1 / upper if lower is None else lower
    else:
        lower = None
    return _within(measured, lower, upper) & response_mask


def off_policy_sequences(
    new_logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    delta: float = 1e-4,
) -> Tensor:
    """Which sequences off-policy sequence masking keeps: all but those that are to be made rarer and are rare already.

    A row is dropped where A < 0 and mean(rollout - new) > delta over its counting tokens, new being the log-probability
    in training, now. Source: DeepSeek-V3.2 (2025), as in TRL and slime.

    Args:
        new_logprobs: [B, R] nats, of the policy in training.
        rollout_logprobs, response_mask: see the module.
        advantages: [B, R], of one sign in each row.
        delta: nats per token.

    Returns:
        [B, 1] bool.
    """
    distance = row_mean(k1(rollout_logprobs, new_logprobs.detach()), response_mask)
    return ~((row_mean(advantages, response_mask) < 0) & (distance > delta))


def proximal_weights(versions: Tensor, current_version: int) -> Tensor:
    """How far the proximal policy of each token is from the one that sampled it to the one in training, from 0 to 1.

    alpha = clamp((n - 1 - v) / (n - v), 0, 1) with n the current version and v the token's: the proximal policy is one
    version behind. 0 for tokens of the current version or, as prompts, of none. Source: AReaL's approximation of the
    proximal policy without a forward pass.

    Args:
        versions: [B, R], the policy version that sampled each token; negative for none.
        current_version: of the policy in training, which the update makes: one more than the engines can have.

    Returns:
        [B, R], in the default float type.
    """
    behind = (current_version - versions).to(torch.get_default_dtype())
    alpha = (behind - 1) / behind.clamp(min=1)
    return torch.where(versions < 0, torch.zeros_like(alpha), alpha.clamp(0, 1))


def proximal_logprobs(
    rollout_logprobs: Tensor,
    new_logprobs: Tensor,
    alpha: Tensor,
    *,
    method: Literal["loglinear", "linear"] = "loglinear",
) -> Tensor:
    """Log-probabilities of the proximal policy, between those of the rollout and of the policy in training.

    loglinear: rollout + alpha * (new - rollout); linear: log((1 - alpha) * exp(rollout) + alpha * exp(new)). Without a
    gradient. Source: AReaL.

    Args:
        rollout_logprobs: [B, R] nats.
        new_logprobs: [B, R] nats.
        alpha: [B, R], by ``proximal_weights``.
        method: see above.

    Returns:
        [B, R] nats.
    """
    new = new_logprobs.detach()
    if method == "loglinear":
        return rollout_logprobs + alpha * (new - rollout_logprobs)
    return torch.logaddexp(torch.log1p(-alpha) + rollout_logprobs, alpha.log() + new)


def _weights(weights: Tensor, counted: Tensor, response_mask: Tensor, reduce: Reduce, batch_normalise: bool) -> Tensor:
    """Per token, 0 off the mask; over the mean of what is counted, tokens or rows, where that is asked for."""
    if batch_normalise:
        own = weights[counted].double()
        number, total = reduce(torch.stack([own.new_tensor(own.numel()), own.sum()])).unbind()
        mean = total / number.clamp(min=1)
        weights = weights / torch.where(mean > 0, mean, torch.ones_like(mean)).to(weights.dtype)
    return on_mask(weights.expand_as(response_mask), response_mask).detach()


def _within(values: Tensor, lower: float | None, upper: float) -> Tensor:
    above = values <= upper
    return above if lower is None else above & (values >= lower)


def _row_sum(values: Tensor, response_mask: Tensor) -> Tensor:
    return on_mask(values, response_mask).sum(-1, keepdim=True)
