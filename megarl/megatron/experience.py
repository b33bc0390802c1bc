"""From rollouts, log-probabilities, values and scores to what an update reads; on one rank per replica of the actor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megarl.algos.kl import k1
from megarl.algos.metrics import objective_metrics, rollout_gap
from megarl.algos.normalisation import Reduce, whiten
from megarl.algos.registry import ADVANTAGES, KL_ESTIMATORS, choose
from megarl.algos.rewards import clip_scores, replace_missing_end, token_rewards
from megarl.config.schema import Algo
from megarl.data.alignment import align, flatten, response_mask
from megarl.data.packing import Chunks
from megarl.types import ExperienceChunk, Ragged, RolloutChunk

Scores = Mapping[int, np.typing.NDArray[np.float32]]


@dataclass(frozen=True, kw_only=True)
class Columns:
    """What the roles computed of the rollouts, by chunk.

    Args:
        old_logprobs: by the actor, nats.
        ref_logprobs: by the reference, nats; None without one.
        values: by the critic.
        scores: [N] float32 per chunk.
    """

    old_logprobs: Chunks[Ragged]
    ref_logprobs: Chunks[Ragged] | None
    values: Chunks[Ragged]
    scores: Scores


def build_experience(
    chunk_ids: list[int], rollouts: Chunks[RolloutChunk], columns: Columns, algo: Algo, reduce: Reduce
) -> tuple[dict[int, ExperienceChunk], dict[str, float]]:
    """Scores to token rewards to advantages, with whitening and metrics over all ranks.

    Args:
        chunk_ids: the chunks of this rank, whole.
        reduce: sums a small vector over the ranks that build; each of them calls, with chunks or without.

    Returns:
        The experience by chunk, and metrics over all samples, equal on all ranks.
    """
    chunks = {i: rollouts[i] for i in chunk_ids}
    lengths = [int(n) for chunk in chunks.values() for n in chunk.response_ids.lengths]
    mask = response_mask(lengths)

    def aligned(column: Chunks[Ragged]) -> Tensor:
        flat = [torch.from_numpy(column[i].values.astype(np.float32)) for i in chunk_ids]
        return align(torch.cat(flat) if flat else torch.zeros(0), mask)

    old = aligned(columns.old_logprobs)
    ref = None if columns.ref_logprobs is None else aligned(columns.ref_logprobs)
    values = aligned(columns.values)
    kl = (
        torch.zeros_like(old)
        if ref is None
        else choose(KL_ESTIMATORS, algo.kl.estimator, "algo.kl.estimator")(old, ref)
    )
    scores = _shaped_scores(chunks, columns.scores, algo)
    rewards = token_rewards(scores, kl, mask, kl_coef=algo.kl.coef)
    estimate = choose(ADVANTAGES, algo.advantage, "algo.advantage")
    advantages, returns = estimate(rewards, values, mask, gamma=algo.gamma, lam=algo.lam)
    if algo.whiten_advantages:
        advantages = whiten(advantages, mask, reduce)
    drift = torch.zeros_like(old) if ref is None else k1(old, ref)
    metrics = objective_metrics(scores, old, drift, mask, kl_coef=algo.kl.coef, reduce=reduce)
    sampled = aligned({i: chunk.rollout_logprobs for i, chunk in chunks.items()})
    metrics["rollout/logprob_gap"] = rollout_gap(old, sampled, mask, reduce=reduce)
    advantages_of, returns_of = _by_chunk(advantages, mask, chunks), _by_chunk(returns, mask, chunks)
    return {
        i: ExperienceChunk(
            sample_ids=chunk.sample_ids,
            prompt_ids=chunk.prompt_ids,
            response_ids=chunk.response_ids,
            old_logprobs=columns.old_logprobs[i],
            old_values=columns.values[i],
            advantages=advantages_of[i],
            returns=returns_of[i],
        )
        for i, chunk in chunks.items()
    }, metrics


def _shaped_scores(chunks: Mapping[int, RolloutChunk], scores: Scores, algo: Algo) -> Tensor:
    """[B] float32, clipped, with the fixed score of unfinished responses."""
    flat = [torch.from_numpy(np.array(scores[i], dtype=np.float32)) for i in chunks]
    shaped = torch.cat(flat) if flat else torch.zeros(0)
    if algo.score_clip is not None:
        shaped = clip_scores(shaped, algo.score_clip)
    if algo.missing_end_score is not None:
        finished = [torch.from_numpy(np.array(chunk.finished, dtype=np.bool_)) for chunk in chunks.values()]
        ended = torch.cat(finished) if finished else torch.zeros(0, dtype=torch.bool)
        shaped = replace_missing_end(shaped, ended, algo.missing_end_score)
    return shaped


def _by_chunk(aligned: Tensor, mask: Tensor, chunks: Mapping[int, RolloutChunk]) -> dict[int, Ragged]:
    """[B, R] of all chunks' rows -> one column per chunk."""
    offsets = [chunk.response_ids.offsets for chunk in chunks.values()]
    parts = flatten(aligned, mask).split([int(o[-1]) for o in offsets])
    return {
        i: Ragged(values=part.numpy().copy(), offsets=own) for i, part, own in zip(chunks, parts, offsets, strict=True)
    }
