"""Builds a step's experience from rollouts, log-probabilities, values and scores.

What a mask leaves out is left out of every term of the loss, the KL penalty and the entropy bonus
included; the denominators stay those of all response tokens. Given tokens of conversations are no
response tokens here, they are in nothing. Samples without a score are in no statistic, and their
advantages are 0.

Shape legend: B rows, R response tokens of the longest. ``reduce`` sums a small vector over the
ranks, ``largest`` takes the largest of each entry; every rank calls them equally often, with
samples or without.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from megarl.algos.advantages import broadcast_advantages
from megarl.algos.kl import k1
from megarl.algos.metrics import (
    averaged,
    correction_metrics,
    gaps_by_age,
    mismatch,
    objective_metrics,
    policy_drift,
    value_metrics,
)
from megarl.algos.normalization import Reduce, masked_moments, on_mask, reduced_sums, whiten_rewards
from megarl.algos.registry import KL_ESTIMATORS, NORMALISERS, ROLLOUT_WEIGHTS, TOKEN_ADVANTAGES, bound
from megarl.algos.reward_shaping import dense_rewards, keep_finished, kl_penalties, token_rewards
from megarl.algos.rollout_correction import m2po, proximal_weights, rejection
from megarl.algos.value_loss import ValueMoments
from megarl.config.schema import Algo, Correction, ValueNorm
from megarl.data.packing import Chunks
from megarl.experience.padded_batch import Columns, PaddedBatch, by_chunk, pad_batch
from megarl.experience.records import ExperienceChunk, ExperienceReport, StepContext, TokenRewardScale
from megarl.types import Ragged, RolloutChunk


def build_experience(
    chunk_ids: list[int],
    rollouts: Chunks[RolloutChunk],
    columns: Columns,
    algo: Algo,
    value_norm: ValueNorm | None,
    context: StepContext,
    reduce: Reduce,
    largest: Reduce,
) -> tuple[dict[int, ExperienceChunk], ExperienceReport]:
    """Builds the experience of a rank's chunks, and the report, which is equal on all ranks."""
    chunks = {index: rollouts[index] for index in chunk_ids}
    batch = pad_batch(chunks, columns, context)
    moments = None
    if context.value_norm is not None:
        moments = ValueMoments(**context.value_norm)
    values = batch.values
    if value_norm is not None and moments is not None and values is not None:
        values = moments.denormalise(values, eps=value_norm.eps)
    advantages = compute_advantages(batch, values, algo, context.dense, reduce, kl_coef=context.kl_coef)
    weights = correction_weights(batch, algo.correction, reduce)
    trust_region = trust_region_mask(batch, algo.correction, reduce)
    corrected = weights
    if trust_region is not None:
        corrected = trust_region.float()
        if weights is not None:
            corrected = weights * trust_region
    recomputed = columns.old_logprobs is not None
    from_update = not recomputed and algo.old_logprobs_from_update
    metrics = experience_metrics(batch, advantages, values, corrected, context, reduce, largest)
    if not from_update:
        metrics |= old_logprob_metrics(batch, context, reduce, recomputed=recomputed)
    returns = advantages.returns
    if value_norm is not None and moments is not None and returns is not None:
        moments = moments.update(returns, batch.scored_mask, reduce, beta=value_norm.beta)
        returns = moments.normalise(returns, eps=value_norm.eps)
    tensors = {
        "advantages": advantages.normalized,
        "returns": returns,
        "weights": weights,
        "actor_mask": actor_mask(batch, trust_region, reduce),
    }
    if (returns is not None or not recomputed) and _any(~batch.scored, reduce):
        tensors["scored_mask"] = batch.scored_mask
    if from_update and context.max_staleness:
        tensors["ages"] = batch.ages
    if algo.correction.interpolates:
        tensors["proximal_weights"] = proximal_weights(context.version - batch.ages, context.version + 1)
    parts = _passed_on(chunks, columns, algo, from_update=from_update)
    for name, tensor in tensors.items():
        if tensor is not None:
            parts[name] = by_chunk(tensor, batch.mask, chunks)
    experience: dict[int, ExperienceChunk] = {}
    for index, chunk in chunks.items():
        experience[index] = ExperienceChunk(
            sample_ids=chunk.sample_ids,
            prompt_ids=chunk.prompt_ids,
            response_ids=chunk.response_ids,
            loss_mask=chunk.loss_mask,
            kept_counts=chunk.kept_counts,
            kept_ids=chunk.kept_ids,
            routes=chunk.routes,
            **{name: column[index] for name, column in parts.items()},
        )
    return experience, ExperienceReport(metrics=metrics, value_norm=moments and asdict(moments))


def _passed_on(
    chunks: Mapping[int, RolloutChunk], columns: Columns, algo: Algo, *, from_update: bool
) -> dict[str, Chunks[Ragged]]:
    """Returns the columns that the losses read and that do not change; they are not copied."""
    rollout_logprobs = {index: chunk.rollout_logprobs for index, chunk in chunks.items()}
    parts: dict[str, Chunks[Ragged]] = {}
    if columns.old_logprobs is not None:
        parts["old_logprobs"] = columns.old_logprobs
    elif not from_update:
        parts["old_logprobs"] = rollout_logprobs
    reads_rollout = "rollout_logprobs" in algo.loss_reads or algo.correction.interpolates
    if from_update or reads_rollout or algo.correction.sequence_mask is not None:
        parts["rollout_logprobs"] = rollout_logprobs
    reads_ref = algo.kl.placement == "loss" or "ref_logprobs" in algo.loss_reads
    if columns.ref_logprobs is not None and (reads_ref or columns.old_logprobs is None):
        parts["ref_logprobs"] = columns.ref_logprobs
    if columns.values is not None:
        parts["old_values"] = columns.values
    return parts


def experience_metrics(
    batch: PaddedBatch,
    advantages: Advantages,
    values: Tensor | None,
    corrected: Tensor | None,
    context: StepContext,
    reduce: Reduce,
    largest: Reduce,
) -> dict[str, float]:
    """The metrics of all ranks' samples, equal on all ranks, but those of ``old_logprob_metrics``.

    The values, [B, R], are in units of reward; ``corrected`` are the weights, [B, R],
    0 outside the trust region.
    """
    scored = batch.scored
    mask = batch.scored_mask
    scores = batch.scores
    if batch.dense is not None or batch.turn_rewards is not None:
        scores = (advantages.rewards - advantages.penalties).sum(-1)
    penalties = advantages.penalties[scored]
    metrics = objective_metrics(scores[scored & batch.first], penalties, batch.mask[scored], reduce=reduce)
    metrics["objective/kl_coef"] = context.kl_coef
    if values is not None and advantages.returns is not None:
        metrics |= value_metrics(advantages.returns, values, mask, reduce=reduce)
    if corrected is not None:
        metrics |= correction_metrics(corrected, batch.old, batch.rollout, batch.mask, reduce=reduce)
    if batch.kept is not None:
        metrics |= kept_metrics(batch.kept, batch.mask, reduce)
    metrics |= spread("rewards", advantages.rewards.sum(-1), scored, reduce, largest)
    metrics |= spread("advantages", advantages.unnormalized, mask, reduce, largest)
    for name, value in spread("staleness", batch.ages, batch.mask, reduce, largest).items():
        if not name.endswith("/min"):
            metrics[name] = value
    if context.max_staleness:
        metrics |= age_metrics(batch, context, reduce)
    return metrics


def kept_metrics(kept: Tensor, mask: Tensor, reduce: Reduce) -> dict[str, float]:
    """Returns the mean number of ids from which a token was sampled, and the part with too many."""
    known = mask & (kept > 0)
    tokens, counted, ids = reduced_sums(reduce, mask.sum(), known.sum(), kept[known].sum())
    return {
        "rollout/kept_ids": ids / max(counted, 1),
        "rollout/kept_exceeded": (tokens - counted) / max(tokens, 1),
    }


def age_metrics(batch: PaddedBatch, context: StepContext, reduce: Reduce) -> dict[str, float]:
    """Returns the fraction of tokens of each age, and the versions per response."""
    ages = batch.ages
    counts = [((ages == age) & batch.mask).sum() for age in range(context.max_staleness + 1)]
    changes = (ages[:, 1:] != ages[:, :-1]) & batch.mask[:, 1:] & batch.mask[:, :-1]
    rows = batch.mask.any(-1).sum()
    responses, spans, *tokens = reduced_sums(reduce, rows, rows + changes.sum(), *counts)
    metrics = {"rollout/version_spans": spans / max(responses, 1)}
    for age, count in enumerate(tokens):
        metrics[f"staleness/age_{age}"] = count / max(sum(tokens), 1)
    return metrics


def old_logprob_metrics(
    batch: PaddedBatch, context: StepContext, reduce: Reduce, *, recomputed: bool
) -> dict[str, float]:
    """Metrics of the old log-probabilities, by the actor (``recomputed``) or by the engines."""
    scored = batch.scored
    kl = None
    if batch.ref is not None:
        kl = k1(batch.old, batch.ref)[scored]
    means = dict(policy_drift(batch.old[scored], kl, batch.mask[scored], batch.lengths[scored]))
    if not recomputed:
        return averaged({name.replace("objective/", "rollout/"): mean for name, mean in means.items()}, reduce)
    means |= mismatch(batch.old, batch.rollout, batch.mask)
    if context.max_staleness:
        means |= gaps_by_age(batch.old, batch.rollout, batch.mask, batch.ages, oldest=context.max_staleness)
    return averaged(means, reduce)


def spread(name: str, values: Tensor, mask: Tensor, reduce: Reduce, largest: Reduce) -> dict[str, float]:
    """Mean, min and max of the values on the mask of all ranks; empty without any."""
    moments = masked_moments(values, mask, reduce)
    chosen = values[mask].double()
    nothing = chosen.new_full((1,), -torch.inf)
    high = torch.cat([chosen, nothing]).max()
    low = torch.cat([-chosen, nothing]).max()
    high, low = largest(torch.stack([high, low])).tolist()
    if not moments.count:
        return {}
    return {f"{name}/mean": float(moments.mean), f"{name}/min": -low, f"{name}/max": high}


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
    learned = batch.mask
    if batch.kept is not None:
        learned = learned & (batch.kept > 0)
    excluded = (~batch.actor_rows).sum() + (learned != batch.mask).sum()
    if not _any(excluded, reduce) and trust_region is None:
        return None
    mask = keep_finished(learned, batch.actor_rows)
    if trust_region is not None:
        mask = mask & trust_region
    return mask


def _any(rows: Tensor, reduce: Reduce) -> bool:
    return bool(reduce(rows.sum().double().reshape(1)) > 0)


@dataclass(frozen=True, kw_only=True)
class Advantages:
    """[B, R] each, 0 off the mask; the rewards are those before whitening, and contain the KL penalties.

    The returns are the critic's targets, in units of reward; None without one.
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
    """Computes KL penalties (``kl_coef`` per nat), token rewards, advantages, and what whitens and normalizes them."""
    mask = batch.scored_mask
    penalties = torch.zeros_like(batch.old)
    if batch.ref is not None and algo.kl.placement != "loss":
        estimate = bound(KL_ESTIMATORS, algo.kl.estimator.name, algo.kl.estimator.options)
        penalties = kl_penalties(estimate(batch.old, batch.ref), mask, kl_coef=kl_coef)
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
