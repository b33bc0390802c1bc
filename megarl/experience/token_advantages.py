"""Rollout corrections, token masks, token rewards and advantages of a rank's samples.

Shape legend: B rows, R response tokens of the longest row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algos.advantages import from_outcomes
from megarl.algos.normalization import Reduce, on_mask, whiten_rewards
from megarl.algos.registry import KL_ESTIMATORS, NORMALISERS, ROLLOUT_WEIGHTS, TOKEN_ADVANTAGES, bound
from megarl.algos.reward_shaping import dense_rewards, keep_finished, kl_penalties, token_rewards
from megarl.algos.rollout_correction import m2po, rejection
from megarl.config.schema import Algo, Correction
from megarl.experience.padded_batch import Aligned
from megarl.types import DenseScale


def correction_weights(own: Aligned, correction: Correction, reduce: Reduce) -> Tensor | None:
    """[B, R], 0 off the mask: the weights of the rollouts; None without any that are known before the update.

    Args:
        own: the samples of a rank.
        correction: of the algorithm.
        reduce: called equally often on every rank, with samples or without.
    """
    if correction.weights is None or correction.old_logprobs != "recompute":
        return None
    weigh = bound(ROLLOUT_WEIGHTS, correction.weights.name, correction.weights.options)
    return weigh(own.old, own.rollout, own.mask, reduce)


def trusted_tokens(own: Aligned, correction: Correction, reduce: Reduce) -> Tensor | None:
    """[B, R] bool, False off the mask: the tokens that all trust regions keep; None without any.

    Args:
        own, correction, reduce: see ``correction_weights``.
    """
    if not correction.reject and correction.m2po is None:
        return None
    columns, trusted = (own.old, own.rollout, own.mask), own.mask
    for bounds in correction.reject:
        trusted = trusted & rejection(*columns, statistic=bounds.statistic, upper=bounds.upper, lower=bounds.lower)
    if correction.m2po is not None:
        trusted = trusted & m2po(*columns, reduce, threshold=correction.m2po.threshold)
    return trusted


def kept_tokens(own: Aligned, trusted: Tensor | None, reduce: Reduce) -> Tensor | None:
    """[B, R] bool: what the actor learns from; None where that is everything on all ranks."""
    left_out = _any(~own.learnt, reduce)
    if trusted is None and not left_out:
        return None
    kept = keep_finished(own.mask, own.learnt)
    return kept if trusted is None else kept & trusted


def value_kept_tokens(own: Aligned, reduce: Reduce) -> Tensor | None:
    """[B, R] bool: what the critic learns from, the responses with a score; None where that is all of them."""
    return own.counted if _any(~own.scored, reduce) else None


def _any(rows: Tensor, reduce: Reduce) -> bool:
    """Whether it holds for a row of any rank."""
    return bool(reduce(rows.sum().double().reshape(1)) > 0)


@dataclass(frozen=True, kw_only=True)
class Credit:
    """What the tokens have earned, [B, R] each, 0 off the mask.

    Args:
        penalties: the part of the rewards that is not a score.
        rewards: before whitening.
        raw: the advantages before they are normalised.
        advantages: of the update.
        returns: for a critic to learn, in the units of the rewards; None without one.
    """

    penalties: Tensor
    rewards: Tensor
    raw: Tensor
    advantages: Tensor
    returns: Tensor | None


def credit(
    own: Aligned, values: Tensor | None, algo: Algo, dense: DenseScale | None, reduce: Reduce, *, kl_coef: float
) -> Credit:
    """The credit of a rank's samples.

    Args:
        own: the samples.
        values: [B, R], by the critic, in the units of the rewards; None without one.
        algo: of the run.
        dense: what the reward model's scores after every token are worth; None where a response has one score.
        reduce: called equally often on every rank, with samples or without.
        kl_coef: of the step, reward per nat where the penalty is in the reward.
    """
    counted = own.counted
    penalties = _penalties(own, algo, kl_coef)
    rewards = on_mask(_rewards(own, penalties, algo, dense), counted)
    if own.outcomes is not None:
        raw, returns = from_outcomes(own.outcomes, penalties, counted, cumulative=algo.kl.cumulative), None
    else:
        learnt = whiten_rewards(rewards, counted, reduce) if algo.normalise.rewards else rewards
        estimate = bound(TOKEN_ADVANTAGES, algo.advantage.name, algo.advantage.options)
        raw, returns = estimate(learnt, values, counted)
    advantages, normaliser = raw, algo.normaliser
    if normaliser is not None:
        normalise = bound(NORMALISERS, normaliser.name, normaliser.options)
        advantages = on_mask(normalise(raw, counted, own.groups, reduce), counted)
    return Credit(
        penalties=penalties,
        rewards=rewards,
        raw=raw,
        advantages=advantages,
        returns=None if values is None else returns,
    )


def _penalties(own: Aligned, algo: Algo, kl_coef: float) -> Tensor:
    """[B, R]: what leaving the reference costs, where that is in the reward."""
    if own.ref is None or algo.kl.placement == "loss":
        return torch.zeros_like(own.old)
    estimate = bound(KL_ESTIMATORS, algo.kl.estimator.name, algo.kl.estimator.options)
    return kl_penalties(estimate(own.old, own.ref), own.counted, kl_coef=kl_coef)


def _rewards(own: Aligned, penalties: Tensor, algo: Algo, dense: DenseScale | None) -> Tensor:
    """[B, R]: the penalties, the reward model's scores where each token has one, and the score of the response."""
    if own.dense is not None:
        assert dense is not None
        worth = dense.gain * own.dense + dense.bias
        clip = algo.scores.clip
        penalties = dense_rewards(worth, penalties, own.counted, differences=dense.differences, clip=clip)
    return token_rewards(own.scores, penalties, own.counted, placement=algo.scores.placement)
