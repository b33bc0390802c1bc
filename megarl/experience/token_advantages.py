"""Token rewards, advantages, rollout corrections, and the masks of actor and critic.

Shapes and ``reduce`` are those of ``experience.build``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algos.advantages import broadcast_advantages
from megarl.algos.normalization import Reduce, on_mask, whiten_rewards
from megarl.algos.registry import KL_ESTIMATORS, NORMALISERS, ROLLOUT_WEIGHTS, TOKEN_ADVANTAGES, bound
from megarl.algos.reward_shaping import dense_rewards, keep_finished, kl_penalties, token_rewards
from megarl.algos.rollout_correction import m2po, rejection
from megarl.config.schema import Algo, Correction
from megarl.experience.padded_batch import PaddedBatch
from megarl.experience.records import TokenRewardScale


def correction_weights(batch: PaddedBatch, correction: Correction, reduce: Reduce) -> Tensor | None:
    """[B, R], 0 off the mask: importance weights of the rollouts; None without any before the update."""
    if correction.weights is None or correction.old_logprobs != "recompute":
        return None
    weigh = bound(ROLLOUT_WEIGHTS, correction.weights.name, correction.weights.options)
    return weigh(batch.old, batch.rollout, batch.mask, reduce)


def trust_region_mask(batch: PaddedBatch, correction: Correction, reduce: Reduce) -> Tensor | None:
    """[B, R] bool, False off the mask: the tokens inside every trust region; None without any."""
    if not correction.reject and correction.m2po is None:
        return None
    columns = (batch.old, batch.rollout, batch.mask)
    mask = batch.mask
    for bounds in correction.reject:
        mask = mask & rejection(*columns, statistic=bounds.statistic, upper=bounds.upper, lower=bounds.lower)
    if correction.m2po is not None:
        mask = mask & m2po(*columns, reduce, threshold=correction.m2po.threshold)
    return mask


def actor_mask(batch: PaddedBatch, trust_region: Tensor | None, reduce: Reduce) -> Tensor | None:
    """[B, R] bool: the tokens that the actor learns from; None for all tokens of all ranks."""
    if not _any(~batch.actor_rows, reduce) and trust_region is None:
        return None
    mask = keep_finished(batch.mask, batch.actor_rows)
    if trust_region is not None:
        mask = mask & trust_region
    return mask


def scored_mask(batch: PaddedBatch, reduce: Reduce) -> Tensor | None:
    """[B, R] bool: the tokens of scored responses; None for all tokens of all ranks."""
    if _any(~batch.scored, reduce):
        return batch.scored_mask
    return None


def _any(rows: Tensor, reduce: Reduce) -> bool:
    return bool(reduce(rows.sum().double().reshape(1)) > 0)


@dataclass(frozen=True, kw_only=True)
class Advantages:
    """Rewards, advantages and returns, [B, R] each, 0 off the mask.

    Args:
        penalties: KL penalty in the rewards.
        rewards: rewards before whitening.
        unnormalized: advantages before normalization.
        normalized: advantages of the update.
        returns: targets of the critic, in units of reward; None without one.
    """

    penalties: Tensor
    rewards: Tensor
    unnormalized: Tensor
    normalized: Tensor
    returns: Tensor | None


def compute_advantages(
    batch: PaddedBatch,
    values: Tensor | None,
    algo: Algo,
    dense: TokenRewardScale | None,
    reduce: Reduce,
    *,
    kl_coef: float,
) -> Advantages:
    """Computes KL penalties, token rewards, their whitening, advantages and their normalization.

    Args:
        values: values by the critic, in units of reward, [B, R].
        kl_coef: reward per nat.
    """
    mask = batch.scored_mask
    penalties = _penalties(batch, algo, kl_coef)
    rewards = on_mask(_rewards(batch, penalties, algo, dense), mask)
    if batch.sequence_advantages is not None:
        unnormalized = broadcast_advantages(batch.sequence_advantages, penalties, mask, cumulative=algo.kl.cumulative)
        returns = None
    else:
        whitened = rewards
        if algo.normalise.rewards:
            whitened = whiten_rewards(rewards, mask, reduce)
        estimate = bound(TOKEN_ADVANTAGES, algo.advantage.name, algo.advantage.options)
        unnormalized, returns = estimate(whitened, values, mask)
    normalized = unnormalized
    normaliser = algo.normaliser
    if normaliser is not None:
        normalise = bound(NORMALISERS, normaliser.name, normaliser.options)
        normalized = on_mask(normalise(unnormalized, mask, batch.groups, reduce), mask)
    return Advantages(
        penalties=penalties,
        rewards=rewards,
        unnormalized=unnormalized,
        normalized=normalized,
        returns=None if values is None else returns,
    )


def _penalties(batch: PaddedBatch, algo: Algo, kl_coef: float) -> Tensor:
    """[B, R]: the KL penalty where it is part of the reward, else 0."""
    if batch.ref is None or algo.kl.placement == "loss":
        return torch.zeros_like(batch.old)
    estimate = bound(KL_ESTIMATORS, algo.kl.estimator.name, algo.kl.estimator.options)
    return kl_penalties(estimate(batch.old, batch.ref), batch.scored_mask, kl_coef=kl_coef)


def _rewards(batch: PaddedBatch, penalties: Tensor, algo: Algo, dense: TokenRewardScale | None) -> Tensor:
    """[B, R]: penalties, token scores of the reward model, and scores of response and turns."""
    mask = batch.scored_mask
    if batch.dense is not None:
        assert dense is not None
        before, after = (dense.gain * side + dense.bias for side in batch.dense)
        clip = algo.scores.clip
        penalties = dense_rewards(before, after, penalties, mask, differences=dense.differences, clip=clip)
    rewards = token_rewards(batch.scores, penalties, mask, placement=algo.scores.placement)
    if batch.turn_rewards is not None:
        rewards = rewards + on_mask(batch.turn_rewards, mask)
    return rewards
