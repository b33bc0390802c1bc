"""From rollouts, log-probabilities, values and scores to what an update reads; on one rank per replica of the actor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from torch import Tensor

from megarl.algos.corrections import proximal_weights
from megarl.algos.normalisation import Reduce
from megarl.algos.value_norm import ValueMoments, denormalised, normalised, scale_of, updated
from megarl.config.schema import Algo, ValueNorm
from megarl.data.columns import Columns
from megarl.data.packing import Chunks
from megarl.megatron.aligned import Aligned, aligned, by_chunk
from megarl.megatron.correction import correction_weights, kept_tokens, trusted_tokens, value_kept_tokens
from megarl.megatron.credit import credit
from megarl.megatron.experience_metrics import experience_metrics
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
