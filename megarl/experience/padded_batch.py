"""The samples of a rank as right-padded [B, R] tensors.

Shape legend: B rows, the samples of the rank's chunks; R response tokens of the longest; T response
tokens of all rows, concatenated ("flat"). Given tokens of conversations are left out, so that the
columns have no gaps.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from megarl.algos.normalization import Groups
from megarl.data.packing import Chunks
from megarl.experience.records import SampleScores, StepContext
from megarl.types import AnyArray, Int64Array, Ragged, RolloutChunk, conversation_of


def response_mask(lengths: Sequence[int] | Tensor) -> Tensor:
    """[B, R] bool, True on the first ``lengths[i]`` columns of row i; [0, 0] without rows."""
    per_row = torch.as_tensor(lengths, dtype=torch.int64)
    width = int(per_row.max()) if len(per_row) else 0
    return torch.arange(width) < per_row[:, None]


def align(flat: Tensor, mask: Tensor) -> Tensor:
    """Pads [T] flat values to [B, R], 0 off the mask; gradients flow back to ``flat``."""
    assert len(flat) == int(mask.sum()), f"{len(flat)} values for {int(mask.sum())} response tokens"
    return flat.new_zeros(mask.shape).masked_scatter(mask, flat)


def flatten(aligned: Tensor, mask: Tensor) -> Tensor:
    """[T] values on the mask, row after row."""
    return aligned[mask]


class Selectable[V](Chunks[V], Protocol):
    """A value per chunk; ``only`` selects some of the chunks."""

    def only(self, chunks: Iterable[int], /) -> Self: ...


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Columns by chunk; each has a float32 row per sample, with a value per response token.

    Args:
        old_logprobs: nats, by the actor before the update; None where the engines' or
            the update's replace them.
        ref_logprobs: nats, by the reference.
        values: values by the critic before the update.
        dense: raw scores by the reward model, see ``ModelEngine.token_scores``; None where a
            response has one score.
    """

    samples: SampleScores
    old_logprobs: Selectable[Ragged] | None
    ref_logprobs: Selectable[Ragged] | None
    values: Selectable[Ragged] | None
    dense: Selectable[Ragged] | None

    def only(self, chunks: Iterable[int]) -> Columns:
        selected = tuple(chunks)
        columns: dict[str, Any] = {}
        for field in fields(self):
            column = getattr(self, field.name)
            if column is not None:
                columns[field.name] = column.only(selected)
        return replace(self, **columns)


@dataclass(frozen=True, kw_only=True)
class PaddedBatch:
    """The samples of a rank.

    Args:
        mask: response tokens, [B, R] bool.
        first: rows that are not further branches of a conversation, [B] bool.
        lengths: number of response tokens of all branches of a row's conversation, [B] int64.
        scored: rows with a score, [B] bool.
        actor_rows: scored rows that the actor learns from, [B] bool.
        scores: scores, [B] float32; 0 without one.
        sequence_advantages: advantages, [B] float32; None where they are estimated per token.
        rollout: log-probabilities by the engines, [B, R] nats.
        old: log-probabilities by the actor before the update, or the engines' until
            it has its own, [B, R] nats.
        ref: log-probabilities by the reference, [B, R] nats.
        values: raw output of the critic, [B, R].
        dense: raw scores by the reward model before and after each token, [B, R] each.
        turn_rewards: reward of each turn at its last token, [B, R]; None where the score has them.
        ages: versions between the weights that sampled a token and the actor's, [B, R] int64.
        kept: number of ids from which a token was sampled, 0 for too many, [B, R] int64; None where
            they are not recorded.
    """

    mask: Tensor
    first: Tensor
    lengths: Tensor
    scored: Tensor
    actor_rows: Tensor
    groups: Groups
    scores: Tensor
    sequence_advantages: Tensor | None
    rollout: Tensor
    old: Tensor
    ref: Tensor | None
    values: Tensor | None
    dense: tuple[Tensor, Tensor] | None
    turn_rewards: Tensor | None
    ages: Tensor
    kept: Tensor | None

    @property
    def scored_mask(self) -> Tensor:
        """[B, R] bool: the tokens of scored responses, over which statistics are taken."""
        return self.mask & self.scored[:, None]


def pad_batch(chunks: Mapping[int, RolloutChunk], columns: Columns, context: StepContext) -> PaddedBatch:
    """Pads the rows of all chunks; a rank without chunks gets the same columns without rows."""
    lengths: list[int] = []
    names: list[str] = []
    for chunk in chunks.values():
        lengths += chunk.rollout_logprobs.lengths.tolist()
        names += map(conversation_of, chunk.sample_ids)
    mask = response_mask(lengths)
    _, first_rows, conversations = np.unique(names, return_index=True, return_inverse=True)
    first = torch.zeros(len(names), dtype=torch.bool)
    first[first_rows] = True
    whole = np.bincount(conversations, weights=lengths)[conversations]

    def padded(column: Chunks[Ragged] | None) -> Tensor | None:
        if column is None:
            return None
        return _padded([column[index].values for index in chunks], mask)

    samples = columns.samples.only(chunks)
    scores = torch.tensor(samples.scores)
    scored = scores.isfinite()
    advantages = None
    if samples.sequence_advantages is not None:
        advantages = torch.tensor(samples.sequence_advantages)
    rollout = _padded([chunk.rollout_logprobs.values for chunk in chunks.values()], mask)
    old = padded(columns.old_logprobs)
    dense = None
    if columns.dense is not None:
        halves = [np.split(row, 2) for index in chunks for row in columns.dense[index]]
        before = _padded([half for half, _ in halves], mask)
        dense = (before, _padded([half for _, half in halves], mask))
    versions = [_versions(chunk) for chunk in chunks.values()]
    kept = None
    if context.records_kept:
        counts = [chunk.kept_counts.values for chunk in chunks.values() if chunk.kept_counts is not None]
        kept = align(_concatenate(counts, np.int64), mask)
    return PaddedBatch(
        mask=mask,
        first=first,
        lengths=torch.tensor(whole, dtype=torch.int64),
        scored=scored,
        actor_rows=scored & torch.tensor(samples.actor_mask),
        groups=Groups(index=torch.tensor(samples.groups), count=context.groups),
        scores=scores.where(scored, 0.0),
        sequence_advantages=advantages,
        rollout=rollout,
        old=rollout if old is None else old,
        ref=padded(columns.ref_logprobs),
        values=padded(columns.values),
        dense=dense,
        turn_rewards=_turn_rewards(chunks, mask, context.turn_rewards),
        ages=context.version - align(_concatenate(versions, np.int64), mask),
        kept=kept,
    )


def by_chunk(values: Tensor, mask: Tensor, chunks: Mapping[int, RolloutChunk]) -> dict[int, Ragged]:
    """Splits [B, R] values into a float32 column per chunk."""
    flat = flatten(values, mask).float().numpy()
    columns: dict[int, Ragged] = {}
    start = 0
    for index, chunk in chunks.items():
        offsets = chunk.rollout_logprobs.offsets
        stop = start + int(offsets[-1])
        columns[index] = Ragged(values=flat[start:stop].copy(), offsets=offsets)
        start = stop
    return columns


def _turn_rewards(chunks: Mapping[int, RolloutChunk], mask: Tensor, factor: float | None) -> Tensor | None:
    """[B, R], the rewards of turns, times the factor.

    The last turn of a branch also gets the rewards of later branches of its conversation, for which
    it has prepared.
    """
    if factor is None:
        return None
    placed = torch.zeros(mask.shape)
    first = 0
    for chunk in chunks.values():
        assert chunk.turns is not None
        assert chunk.turn_rewards is not None
        later: dict[str, float] = {}
        for row in reversed(range(len(chunk.sample_ids))):
            conversation = conversation_of(chunk.sample_ids[row])
            rewards = chunk.turn_rewards[row].copy()
            prepared = later.get(conversation, 0.0)
            later[conversation] = rewards.sum() + prepared
            if len(rewards):
                rewards[-1] += prepared
            ends = torch.from_numpy(chunk.turns[row].astype(np.int64))
            placed[first + row, ends - 1] = factor * torch.from_numpy(rewards.astype(np.float32))
        first += len(chunk.sample_ids)
    return placed


def _versions(chunk: RolloutChunk) -> Int64Array:
    """[T], the version that sampled each token of a chunk."""
    spans = list(itertools.chain.from_iterable(chunk.versions))
    versions = np.array([span.version for span in spans], dtype=np.int64)
    return np.repeat(versions, [span.stop - span.start for span in spans])


def _padded(parts: Sequence[AnyArray], mask: Tensor) -> Tensor:
    return align(_concatenate(parts, np.float32), mask)


def _concatenate(parts: Sequence[AnyArray], dtype: Any) -> Tensor:
    """Copies the parts, which may be views of read-only memory."""
    return torch.from_numpy(np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype))
