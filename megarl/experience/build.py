"""Builds a step's experience from rollouts, log-probabilities, values and scores, and computes its metrics.

What a mask leaves out is left out of every term of the loss, the KL penalty and the entropy bonus included; the
denominators stay those of all response tokens. Given tokens of conversations are no response tokens here, they are in
nothing. Samples without a score are in no statistic, and their advantages are 0.

Shape legend: B rows, R response tokens of the longest. ``reduce`` sums a small vector over the ranks, ``largest`` takes
the largest of each entry; every rank calls them equally often, with samples or without.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

import torch
from torch import Tensor

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
from megarl.algos.normalization import Reduce, masked_moments, reduced_sums
from megarl.algos.rollout_correction import proximal_weights
from megarl.algos.value_loss import ValueMoments
from megarl.config.schema import Algo, ValueNorm
from megarl.data.packing import Chunks
from megarl.experience.padded_batch import Columns, PaddedBatch, by_chunk, pad_batch
from megarl.experience.records import ExperienceChunk, ExperienceReport, StepContext
from megarl.experience.token_advantages import (
    Advantages,
    actor_mask,
    compute_advantages,
    correction_weights,
    scored_mask,
    trust_region_mask,
)
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
    """Builds the experience of a rank's chunks, by chunk, and the report, which is equal on all ranks.

    Args:
        value_norm: of the critic; None where it learns returns as they are.
    """
    chunks = {i: rollouts[i] for i in chunk_ids}
    batch = pad_batch(chunks, columns, context)
    moments = None if context.value_norm is None else ValueMoments(**context.value_norm)
    values = batch.values
    if value_norm is not None and moments is not None and values is not None:
        values = moments.denormalise(values, eps=value_norm.eps)
    advantages = compute_advantages(batch, values, algo, context.dense, reduce, kl_coef=context.kl_coef)
    weights = correction_weights(batch, algo.correction, reduce)
    trust_region = trust_region_mask(batch, algo.correction, reduce)
    corrected = weights
    if trust_region is not None:
        corrected = trust_region.float() if weights is None else weights * trust_region
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
        "scored_mask": scored_mask(batch, reduce) if returns is not None or not recomputed else None,
    }
    if from_update and context.max_staleness:
        tensors["ages"] = context.version - batch.versions
    if algo.correction.interpolates:
        tensors["proximal_weights"] = proximal_weights(batch.versions, context.version + 1)
    split = {name: by_chunk(tensor, batch.mask, chunks) for name, tensor in tensors.items() if tensor is not None}
    report = ExperienceReport(metrics=metrics, value_norm=None if moments is None else asdict(moments))
    return {i: _experience_chunk(i, chunk, columns, algo, split) for i, chunk in chunks.items()}, report


def _experience_chunk(
    index: int, chunk: RolloutChunk, columns: Columns, algo: Algo, split: Mapping[str, Mapping[int, Ragged]]
) -> ExperienceChunk:
    """The experience of one chunk; columns that do not change are not copied."""
    correction = algo.correction
    from_update = columns.old_logprobs is None and algo.old_logprobs_from_update
    old = chunk.rollout_logprobs if columns.old_logprobs is None else columns.old_logprobs[index]
    needs_rollout = from_update or correction.sequence_mask is not None or correction.interpolates
    needs_rollout = needs_rollout or "rollout_logprobs" in algo.loss_reads
    needs_ref = algo.kl.placement == "loss" or columns.old_logprobs is None or "ref_logprobs" in algo.loss_reads
    ref = columns.ref_logprobs if needs_ref else None
    return ExperienceChunk(
        sample_ids=chunk.sample_ids,
        prompt_ids=chunk.prompt_ids,
        response_ids=chunk.response_ids,
        loss_mask=chunk.loss_mask,
        old_logprobs=None if from_update else old,
        ref_logprobs=None if ref is None else ref[index],
        rollout_logprobs=chunk.rollout_logprobs if needs_rollout else None,
        old_values=None if columns.values is None else columns.values[index],
        **{name: of_chunks[index] for name, of_chunks in split.items()},
    )


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

    Args:
        values: [B, R], by the critic, in units of reward.
        corrected: [B, R], weights of the rollouts, 0 outside the trust region; None without corrections.
    """
    scored = batch.scored
    mask = batch.scored_mask
    of_tokens = batch.dense is not None or batch.turn_rewards is not None
    scores = (advantages.rewards - advantages.penalties).sum(-1) if of_tokens else batch.scores
    columns = (scores[scored & batch.first], advantages.penalties[scored], batch.mask[scored])
    metrics = {**objective_metrics(*columns, reduce=reduce), "objective/kl_coef": context.kl_coef}
    if values is not None and advantages.returns is not None:
        metrics |= value_metrics(advantages.returns, values, mask, reduce=reduce)
    if corrected is not None:
        metrics |= correction_metrics(corrected, batch.old, batch.rollout, batch.mask, reduce=reduce)
    metrics |= spread("rewards", advantages.rewards.sum(-1), scored, reduce, largest)
    metrics |= spread("advantages", advantages.unnormalized, mask, reduce, largest)
    staleness = spread("staleness", context.version - batch.versions, batch.mask, reduce, largest)
    metrics |= {name: value for name, value in staleness.items() if not name.endswith("/min")}
    return metrics | age_metrics(batch, context, reduce) if context.max_staleness else metrics


def age_metrics(batch: PaddedBatch, context: StepContext, reduce: Reduce) -> dict[str, float]:
    """Returns the fraction of tokens of each age, and the versions per response.

    The age of a token is the number of versions between the weights that sampled it and the actor's.
    """
    ages = context.version - batch.versions
    own = [(ages == age) & batch.mask for age in range(context.max_staleness + 1)]
    changes = (batch.versions[:, 1:] != batch.versions[:, :-1]) & batch.mask[:, 1:] & batch.mask[:, :-1]
    rows = batch.mask.any(-1).sum()
    counts = [mask.sum() for mask in own]
    responses, spans, *tokens = reduced_sums(reduce, rows, rows + changes.sum(), *counts)
    fractions = {f"staleness/age_{age}": count / max(sum(tokens), 1) for age, count in enumerate(tokens)}
    return {"rollout/version_spans": spans / max(responses, 1), **fractions}


def old_logprob_metrics(
    batch: PaddedBatch, context: StepContext, reduce: Reduce, *, recomputed: bool
) -> dict[str, float]:
    """The metrics of the old log-probabilities: of the actor (``recomputed``), or of the engines, which say so."""
    scored = batch.scored
    old = (batch.old, batch.rollout, batch.mask)
    kl = None if batch.ref is None else k1(batch.old, batch.ref)[scored]
    means = dict(policy_drift(batch.old[scored], kl, batch.mask[scored], batch.lengths[scored]))
    if not recomputed:
        return averaged({name.replace("objective/", "rollout/"): mean for name, mean in means.items()}, reduce)
    means |= mismatch(*old)
    if context.max_staleness:
        means |= gaps_by_age(*old, context.version - batch.versions, oldest=context.max_staleness)
    return averaged(means, reduce)


def spread(name: str, values: Tensor, mask: Tensor, reduce: Reduce, largest: Reduce) -> dict[str, float]:
    """``name/mean``, ``name/min`` and ``name/max`` of the values on the mask of all ranks; empty without any."""
    moments = masked_moments(values, mask, reduce)
    chosen = values[mask].double()
    ends = torch.stack([torch.cat([side, side.new_full((1,), -torch.inf)]).max() for side in (chosen, -chosen)])
    high, low = largest(ends).tolist()
    if not moments.count:
        return {}
    return {f"{name}/mean": float(moments.mean), f"{name}/min": -low, f"{name}/max": high}
