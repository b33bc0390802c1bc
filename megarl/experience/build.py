"""Builds the experience of a step from rollouts, log-probabilities, values and scores; and its metrics.

What a mask leaves out is left out of every term of the loss, the penalty and the entropy bonus included; the
denominators stay those of all response tokens. Samples without a score are in no statistic, and their advantages are 0.

Shape legend: B rows, R response tokens of the longest. ``reduce`` sums a small vector over the ranks that build, and
``largest`` takes the largest of each entry; every rank calls them equally often, with samples or without.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

import torch
from torch import Tensor

from megarl.algos.kl import k1
from megarl.algos.metrics import (
    correction_metrics,
    mismatch_metrics,
    objective_metrics,
    rollout_gap,
    value_metrics,
)
from megarl.algos.normalization import Reduce, masked_moments
from megarl.algos.rollout_correction import proximal_weights
from megarl.algos.value_loss import ValueMoments, denormalised, normalised, scale_of, updated
from megarl.config.schema import Algo, ValueNorm
from megarl.data.packing import Chunks
from megarl.experience.padded_batch import Columns, PaddedBatch, by_chunk, pad_batch
from megarl.experience.token_advantages import (
    Advantages,
    actor_mask,
    compute_advantages,
    correction_weights,
    critic_mask,
    trust_region_mask,
)
from megarl.types import ExperienceChunk, ExperienceReport, Ragged, RolloutChunk, StepContext

INTERPOLATED = ("loglinear", "linear")
"""Methods by which the update interpolates old log-probabilities between the engines' and its own."""


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
    """Builds the experience of a rank's chunks.

    Args:
        chunk_ids: the chunks of this rank, whole.
        rollouts, columns: of those chunks at least.
        value_norm: of the critic; None where it learns returns as they are.

    Returns:
        The experience by chunk, and the report, which is equal on all ranks.
    """
    chunks = {i: rollouts[i] for i in chunk_ids}
    batch = pad_batch(chunks, columns, algo, context)
    moments = None if context.value_norm is None else ValueMoments(**context.value_norm)
    values = batch.values
    if value_norm is not None and moments is not None and values is not None:
        values = denormalised(values, scale_of(moments, eps=value_norm.eps))
    advantages = compute_advantages(batch, values, algo, context.dense, reduce, kl_coef=context.kl_coef)
    weights = correction_weights(batch, algo.correction, reduce)
    trust_region = trust_region_mask(batch, algo.correction, reduce)
    corrected = _product(weights, trust_region)
    metrics = experience_metrics(batch, advantages, values, corrected, algo, context, reduce, largest)
    returns = advantages.returns
    if value_norm is not None and moments is not None and returns is not None:
        moments = updated(moments, returns, batch.scored_mask, reduce, beta=value_norm.beta)
        returns = normalised(returns, scale_of(moments, eps=value_norm.eps))
    tensors = {
        "advantages": advantages.normalized,
        "returns": returns,
        "weights": weights,
        "actor_mask": actor_mask(batch, trust_region, reduce),
        "critic_mask": None if returns is None else critic_mask(batch, reduce),
        "proximal_weights": None,
    }
    if algo.correction.old_logprobs in INTERPOLATED:
        tensors["proximal_weights"] = proximal_weights(batch.versions, context.version + 1)
    split = {name: by_chunk(tensor, batch.mask, chunks) for name, tensor in tensors.items() if tensor is not None}
    report = ExperienceReport(metrics=metrics, value_norm=None if moments is None else asdict(moments))
    return {i: _chunk(i, chunk, columns, algo, split) for i, chunk in chunks.items()}, report


def _product(weights: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """[B, R]: the weights on the mask, 0 elsewhere; None without either."""
    if weights is None or mask is None:
        return weights if mask is None else mask.float()
    return weights * mask


def _chunk(
    index: int, chunk: RolloutChunk, columns: Columns, algo: Algo, split: Mapping[str, Mapping[int, Ragged]]
) -> ExperienceChunk:
    """The experience of one chunk; columns that do not change are not copied."""
    correction = algo.correction
    sampled = correction.sequence_mask is not None or correction.old_logprobs in INTERPOLATED
    ref = columns.ref_logprobs if algo.kl.placement == "loss" else None
    return ExperienceChunk(
        sample_ids=chunk.sample_ids,
        prompt_ids=chunk.prompt_ids,
        response_ids=chunk.response_ids,
        old_logprobs=chunk.rollout_logprobs if columns.old_logprobs is None else columns.old_logprobs[index],
        ref_logprobs=None if ref is None else ref[index],
        rollout_logprobs=chunk.rollout_logprobs if sampled else None,
        old_values=None if columns.values is None else columns.values[index],
        **{name: of_chunks[index] for name, of_chunks in split.items()},
    )


def experience_metrics(
    batch: PaddedBatch,
    advantages: Advantages,
    values: Tensor | None,
    corrected: Tensor | None,
    algo: Algo,
    context: StepContext,
    reduce: Reduce,
    largest: Reduce,
) -> dict[str, float]:
    """The metrics of all ranks' samples, equal on all ranks; those without a sample are left out.

    Args:
        values: [B, R], by the critic, in units of reward; None without one.
        corrected: [B, R], weights of the rollouts, 0 outside the trust region; None where nothing is corrected.
    """
    scored, mask = batch.scored, batch.scored_mask
    scores = batch.scores if batch.dense is None else (advantages.rewards - advantages.penalties).sum(-1)
    kl = None if batch.ref is None else k1(batch.old, batch.ref)[scored]
    columns = (scores[scored], batch.old[scored], kl, advantages.penalties[scored], batch.mask[scored])
    metrics = {**objective_metrics(*columns, reduce=reduce), "objective/kl_coef": context.kl_coef}
    if values is not None and advantages.returns is not None:
        metrics |= value_metrics(advantages.returns, values, mask, reduce=reduce)
    if algo.correction.old_logprobs == "recompute":
        metrics["rollout/logprob_gap"] = rollout_gap(batch.old, batch.rollout, batch.mask, reduce=reduce)
        metrics |= mismatch_metrics(batch.old, batch.rollout, batch.mask, reduce=reduce)
    if corrected is not None:
        metrics |= correction_metrics(corrected, batch.old, batch.rollout, batch.mask, reduce=reduce)
    metrics |= spread("rewards", advantages.rewards.sum(-1), scored, reduce, largest)
    metrics |= spread("advantages", advantages.unnormalized, mask, reduce, largest)
    staleness = spread("staleness", context.version - batch.versions, batch.mask, reduce, largest)
    metrics |= {name: value for name, value in staleness.items() if not name.endswith("/min")}
    return metrics


def spread(name: str, values: Tensor, mask: Tensor, reduce: Reduce, largest: Reduce) -> dict[str, float]:
    """``name/mean``, ``name/min`` and ``name/max`` of the values on the mask of all ranks; empty without any."""
    moments = masked_moments(values, mask, reduce)
    chosen = values[mask].double()
    ends = torch.stack([torch.cat([side, side.new_full((1,), -torch.inf)]).max() for side in (chosen, -chosen)])
    high, low = largest(ends).tolist()
    if not moments.count:
        return {}
    return {f"{name}/mean": float(moments.mean), f"{name}/min": -low, f"{name}/max": high}
