"""From rollouts, log-probabilities, values and scores to what an update reads; on one rank per replica of the actor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megarl.algos.advantages import per_token
from megarl.algos.kl import k1
from megarl.algos.metrics import objective_metrics, rollout_gap, value_metrics
from megarl.algos.normalisation import Reduce, whiten
from megarl.algos.registry import KL_ESTIMATORS, TOKEN_ADVANTAGES, bound
from megarl.algos.rewards import kl_penalties, token_rewards
from megarl.config.schema import Algo
from megarl.data.alignment import align, flatten, response_mask
from megarl.data.packing import Chunks
from megarl.types import ExperienceChunk, Ragged, RolloutChunk

PerSample = Mapping[int, np.typing.NDArray[np.float32]]
"""[N] float32 by chunk."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """What is known of the rollouts, by chunk.

    Args:
        old_logprobs: by the actor, nats.
        ref_logprobs: by the reference, nats; None without one.
        values: by the critic; None without one.
        scores: of the samples, as the algorithm takes them: clipped, and what else ``algos.rewards`` makes of them.
        outcomes: an advantage per sample, of registry.OUTCOME_ADVANTAGES; None where advantages are of tokens.
    """

    old_logprobs: Chunks[Ragged]
    ref_logprobs: Chunks[Ragged] | None
    values: Chunks[Ragged] | None
    scores: PerSample
    outcomes: PerSample | None


@dataclass(frozen=True, kw_only=True)
class _Aligned:
    """The columns of a rank's samples as tensors: [B, R], scores and outcomes [B]."""

    mask: Tensor
    old: Tensor
    ref: Tensor | None
    values: Tensor | None
    scores: Tensor
    outcomes: Tensor | None


def build_experience(
    chunk_ids: list[int],
    rollouts: Chunks[RolloutChunk],
    columns: Columns,
    algo: Algo,
    reduce: Reduce,
    *,
    kl_coef: float,
) -> tuple[dict[int, ExperienceChunk], dict[str, float]]:
    """Scores to token rewards to advantages, with whitening and metrics over all ranks.

    Args:
        chunk_ids: the chunks of this rank, whole.
        reduce: sums a small vector over the ranks that build; each of them calls, with chunks or without.
        kl_coef: of the step, reward or loss per nat.

    Returns:
        The experience by chunk, and metrics over all samples, equal on all ranks.
    """
    chunks = {i: rollouts[i] for i in chunk_ids}
    own = _aligned(chunks, columns)
    mask = own.mask
    penalties = _penalties(own, algo, kl_coef)
    advantages, returns = _advantages(own, penalties, algo, reduce)
    drift = torch.zeros_like(own.old) if own.ref is None else k1(own.old, own.ref)
    metrics = objective_metrics(own.scores, own.old, drift, penalties, mask, reduce=reduce)
    metrics["objective/kl_coef"] = kl_coef
    if own.values is not None and returns is not None:
        metrics |= value_metrics(returns, own.values, mask, reduce=reduce)
    sampled = _per_token({i: chunk.rollout_logprobs for i, chunk in chunks.items()}, mask, chunks)
    metrics["rollout/logprob_gap"] = rollout_gap(own.old, sampled, mask, reduce=reduce)
    advantages_of = _by_chunk(advantages, mask, chunks)
    returns_of = None if returns is None else _by_chunk(returns, mask, chunks)
    ref_of = columns.ref_logprobs if algo.kl.placement == "loss" else None
    return {
        i: ExperienceChunk(
            sample_ids=chunk.sample_ids,
            prompt_ids=chunk.prompt_ids,
            response_ids=chunk.response_ids,
            old_logprobs=columns.old_logprobs[i],
            ref_logprobs=None if ref_of is None else ref_of[i],
            old_values=None if columns.values is None else columns.values[i],
            advantages=advantages_of[i],
            returns=None if returns_of is None else returns_of[i],
        )
        for i, chunk in chunks.items()
    }, metrics


def _penalties(own: _Aligned, algo: Algo, kl_coef: float) -> Tensor:
    """[B, R]: the part of the rewards that is not the score."""
    if own.ref is None or algo.kl.placement == "loss":
        return torch.zeros_like(own.old)
    estimate = bound(KL_ESTIMATORS, algo.kl.estimator.name, algo.kl.estimator.options)
    return kl_penalties(estimate(own.old, own.ref), own.mask, kl_coef=kl_coef)


def _advantages(own: _Aligned, penalties: Tensor, algo: Algo, reduce: Reduce) -> tuple[Tensor, Tensor | None]:
    """[B, R] each: the advantages of the update, and the critic's returns where there is one."""
    if own.outcomes is not None:
        assert own.ref is None or algo.kl.placement == "loss", "a comparison of scores knows no penalty per token"
        return per_token(own.outcomes, own.mask), None
    assert own.values is not None, f"{algo.advantage.name} needs values"
    estimate = bound(TOKEN_ADVANTAGES, algo.advantage.name, algo.advantage.options)
    rewards = token_rewards(own.scores, penalties, own.mask)
    advantages, returns = estimate(rewards, own.values, own.mask)
    return whiten(advantages, own.mask, reduce) if algo.normaliser is not None else advantages, returns


def _aligned(chunks: Mapping[int, RolloutChunk], columns: Columns) -> _Aligned:
    mask = response_mask([int(n) for chunk in chunks.values() for n in chunk.response_ids.lengths])

    def tokens(column: Chunks[Ragged] | None) -> Tensor | None:
        return None if column is None else _per_token(column, mask, chunks)

    return _Aligned(
        mask=mask,
        old=_per_token(columns.old_logprobs, mask, chunks),
        ref=tokens(columns.ref_logprobs),
        values=tokens(columns.values),
        scores=_per_sample(columns.scores, chunks),
        outcomes=None if columns.outcomes is None else _per_sample(columns.outcomes, chunks),
    )


def _per_token(column: Chunks[Ragged], mask: Tensor, chunks: Iterable[int]) -> Tensor:
    """[B, R] float32 of all chunks' rows."""
    return align(_joined([column[i].values for i in chunks]), mask)


def _per_sample(column: PerSample, chunks: Iterable[int]) -> Tensor:
    """[B] float32 of all chunks' rows."""
    return _joined([column[i] for i in chunks])


def _joined(parts: Sequence[np.typing.NDArray[Any]]) -> Tensor:
    """One float32 copy of all parts, which may be views of read-only memory."""
    return torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *parts]).astype(np.float32))


def _by_chunk(aligned: Tensor, mask: Tensor, chunks: Mapping[int, RolloutChunk]) -> dict[int, Ragged]:
    """[B, R] of all chunks' rows -> one column per chunk."""
    offsets = [chunk.response_ids.offsets for chunk in chunks.values()]
    parts = flatten(aligned, mask).split([int(o[-1]) for o in offsets])
    return {
        i: Ragged(values=part.numpy().copy(), offsets=own) for i, part, own in zip(chunks, parts, offsets, strict=True)
    }
