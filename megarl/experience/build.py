"""Builds the experience that updates read, from rollouts, log-probabilities, values and scores; and its metrics.

Weights are factors of the policy loss. What is left out is so in every term of the loss, the penalty and the bonus as
well; the denominators stay.

The order: penalties, token rewards, their whitening, the estimator (or the comparison that the driver made of whole
samples), and the normalisation of the advantages. Samples without a score are in no statistic, and their advantages
are 0. Shape legend: B rows, R response tokens of the longest.
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
from megarl.experience.padded_batch import Aligned, Columns, aligned, by_chunk
from megarl.experience.token_advantages import (
    Credit,
    correction_weights,
    credit,
    kept_tokens,
    trusted_tokens,
    value_kept_tokens,
)
from megarl.types import ExperienceChunk, ExperienceReport, ExperienceTerms, Ragged, RolloutChunk

INTERPOLATED = ("loglinear", "linear")
"""Old log-probabilities that the loss makes of the engines' and its own."""


def build_experience(
    chunk_ids: list[int],
    rollouts: Chunks[RolloutChunk],
    columns: Columns,
    algo: Algo,
    value_norm: ValueNorm | None,
    terms: ExperienceTerms,
    reduce: Reduce,
    largest: Reduce,
) -> tuple[dict[int, ExperienceChunk], ExperienceReport]:
    """Scores to token rewards to advantages, with statistics and metrics over all ranks.

    Args:
        chunk_ids: the chunks of this rank, whole.
        rollouts, columns: of those chunks at least.
        algo: of the run.
        value_norm: of the critic; None where it learns returns as they are.
        terms: of the step.
        reduce: sums a small vector over the ranks that build; each of them calls, with chunks or without.
        largest: likewise, the largest of each entry.

    Returns:
        The experience by chunk, and what all ranks say alike.
    """
    chunks = {i: rollouts[i] for i in chunk_ids}
    own = aligned(chunks, columns, algo, terms)
    moments = None if terms.value_norm is None else ValueMoments(**terms.value_norm)
    values = own.values
    if value_norm is not None and moments is not None and values is not None:
        values = denormalised(values, scale_of(moments, eps=value_norm.eps))
    earned = credit(own, values, algo, terms.dense, reduce, kl_coef=terms.kl_coef)
    weights = correction_weights(own, algo.correction, reduce)
    trusted = trusted_tokens(own, algo.correction, reduce)
    corrected = _product(weights, trusted)
    metrics = experience_metrics(own, earned, values, corrected, algo, terms, reduce, largest)
    returns = earned.returns
    if value_norm is not None and moments is not None and returns is not None:
        moments = updated(moments, returns, own.counted, reduce, beta=value_norm.beta)
        returns = normalised(returns, scale_of(moments, eps=value_norm.eps))
    report = ExperienceReport(metrics=metrics, value_norm=None if moments is None else asdict(moments))
    tensors = {
        "advantages": earned.advantages,
        "returns": returns,
        "weights": weights,
        "kept": kept_tokens(own, trusted, reduce),
        "value_kept": None if returns is None else value_kept_tokens(own, reduce),
        "proximal_weights": _proximal_weights(own, algo, terms),
    }
    split = {name: by_chunk(tensor, own.mask, chunks) for name, tensor in tensors.items() if tensor is not None}
    return {i: _chunk(i, chunk, columns, algo, split) for i, chunk in chunks.items()}, report


def _product(weights: Tensor | None, trusted: Tensor | None) -> Tensor | None:
    """[B, R]: the weights where the tokens are trusted, 0 elsewhere; None without either."""
    if weights is None or trusted is None:
        return weights if trusted is None else trusted.float()
    return weights * trusted


def _proximal_weights(own: Aligned, algo: Algo, terms: ExperienceTerms) -> Tensor | None:
    """[B, R]: how far the old policy of each token is on the way from the engines' to the one in training."""
    if algo.correction.old_logprobs not in INTERPOLATED:
        return None
    return proximal_weights(own.versions, terms.version + 1)


def _chunk(
    index: int, chunk: RolloutChunk, columns: Columns, algo: Algo, split: Mapping[str, Mapping[int, Ragged]]
) -> ExperienceChunk:
    """One chunk's columns; those that are as they came are not copied."""
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
    own: Aligned,
    earned: Credit,
    values: Tensor | None,
    corrected: Tensor | None,
    algo: Algo,
    terms: ExperienceTerms,
    reduce: Reduce,
    largest: Reduce,
) -> dict[str, float]:
    """The metrics of a rank's samples with those of all others, equal on all ranks; none over samples of no rank.

    Args:
        own: the samples.
        earned: by them.
        values: [B, R], by the critic, in the units of the rewards; None without one.
        corrected: [B, R], weights for rollouts of another policy; None where nothing is corrected.
        algo: of the run.
        terms: of the step.
        reduce, largest: sum and largest over the ranks; each calls equally often, with samples or without.
    """
    scored, counted = own.scored, own.counted
    scores = own.scores if own.dense is None else (earned.rewards - earned.penalties).sum(-1)
    drift = None if own.ref is None else k1(own.old, own.ref)[scored]
    kept = (scores[scored], own.old[scored], drift, earned.penalties[scored], own.mask[scored])
    metrics = {**objective_metrics(*kept, reduce=reduce), "objective/kl_coef": terms.kl_coef}
    if values is not None and earned.returns is not None:
        metrics |= value_metrics(earned.returns, values, counted, reduce=reduce)
    if algo.correction.old_logprobs == "recompute":
        metrics["rollout/logprob_gap"] = rollout_gap(own.old, own.rollout, own.mask, reduce=reduce)
        metrics |= mismatch_metrics(own.old, own.rollout, own.mask, reduce=reduce)
    if corrected is not None:
        metrics |= correction_metrics(corrected, own.old, own.rollout, own.mask, reduce=reduce)
    metrics |= spread("rewards", earned.rewards.sum(-1), scored, reduce, largest)
    metrics |= spread("advantages", earned.raw, counted, reduce, largest)
    age = spread("staleness", terms.version - own.versions, own.mask, reduce, largest)
    metrics |= {name: value for name, value in age.items() if not name.endswith("/min")}
    return metrics


def spread(name: str, values: Tensor, mask: Tensor, reduce: Reduce, largest: Reduce) -> dict[str, float]:
    """Mean, smallest and largest of what counts on all ranks; none of them where nothing does.

    Args:
        name: before ``/mean``, ``/min`` and ``/max``.
        values: any shape.
        mask: bool, same shape.
        reduce, largest: sum and largest over the ranks.
    """
    moments = masked_moments(values, mask, reduce)
    own = values[mask].double()
    ends = torch.stack([torch.cat([side, side.new_full((1,), -torch.inf)]).max() for side in (own, -own)])
    high, low = largest(ends).tolist()
    if not moments.count:
        return {}
    return {f"{name}/mean": float(moments.mean), f"{name}/min": -low, f"{name}/max": high}
