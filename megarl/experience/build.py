"""Builds a step's experience from rollouts, log-probabilities, values and scores.

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
    """Builds the experience of a rank's chunks, and the report, which is equal on all ranks.

    Args:
        value_norm: settings of the critic's value normalizer; None without one.
    """
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
    if returns is not None or not recomputed:
        tensors["scored_mask"] = scored_mask(batch, reduce)
    if from_update and context.max_staleness:
        tensors["ages"] = context.version - batch.versions
    if algo.correction.interpolates:
        tensors["proximal_weights"] = proximal_weights(batch.versions, context.version + 1)
    made: dict[str, dict[int, Ragged]] = {}
    for name, tensor in tensors.items():
        if tensor is not None:
            made[name] = by_chunk(tensor, batch.mask, chunks)
    experience: dict[int, ExperienceChunk] = {}
    for index, chunk in chunks.items():
        experience[index] = _experience_chunk(index, chunk, columns, algo, made)
    return experience, ExperienceReport(metrics=metrics, value_norm=moments and asdict(moments))


def _experience_chunk(
    index: int, chunk: RolloutChunk, columns: Columns, algo: Algo, made: Mapping[str, Mapping[int, Ragged]]
) -> ExperienceChunk:
    """The experience of one chunk; columns that do not change are not copied."""
    parts: dict[str, Ragged] = {name: column[index] for name, column in made.items()}
    recomputed = columns.old_logprobs is not None
    from_update = not recomputed and algo.old_logprobs_from_update
    if columns.old_logprobs is not None:
        parts["old_logprobs"] = columns.old_logprobs[index]
    elif not from_update:
        parts["old_logprobs"] = chunk.rollout_logprobs
    masks_sequences = algo.correction.sequence_mask is not None
    reads_rollout = "rollout_logprobs" in algo.loss_reads or algo.correction.interpolates
    if from_update or masks_sequences or reads_rollout:
        parts["rollout_logprobs"] = chunk.rollout_logprobs
    needs_ref = algo.kl.placement == "loss" or not recomputed or "ref_logprobs" in algo.loss_reads
    if columns.ref_logprobs is not None and needs_ref:
        parts["ref_logprobs"] = columns.ref_logprobs[index]
    if columns.values is not None:
        parts["old_values"] = columns.values[index]
    return ExperienceChunk(
        sample_ids=chunk.sample_ids,
        prompt_ids=chunk.prompt_ids,
        response_ids=chunk.response_ids,
        loss_mask=chunk.loss_mask,
        **parts,
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
        values: values by the critic, in units of reward, [B, R].
        corrected: weights of the rollouts, 0 outside the trust region, [B, R]; None without corrections.
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
    metrics |= spread("rewards", advantages.rewards.sum(-1), scored, reduce, largest)
    metrics |= spread("advantages", advantages.unnormalized, mask, reduce, largest)
    ages = context.version - batch.versions
    for name, value in spread("staleness", ages, batch.mask, reduce, largest).items():
        if not name.endswith("/min"):
            metrics[name] = value
    if context.max_staleness:
        metrics |= age_metrics(batch, context, reduce)
    return metrics


def age_metrics(batch: PaddedBatch, context: StepContext, reduce: Reduce) -> dict[str, float]:
    """Returns the fraction of tokens of each age, and the versions per response.

    The age of a token is the number of versions between the weights that sampled it and the actor's.
    """
    ages = context.version - batch.versions
    counts = [((ages == age) & batch.mask).sum() for age in range(context.max_staleness + 1)]
    changes = (batch.versions[:, 1:] != batch.versions[:, :-1]) & batch.mask[:, 1:] & batch.mask[:, :-1]
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
        ages = context.version - batch.versions
        means |= gaps_by_age(batch.old, batch.rollout, batch.mask, ages, oldest=context.max_staleness)
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
