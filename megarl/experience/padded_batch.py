"""The samples of a rank as right-padded [B, R] tensors.

Shape legend: B rows, the samples of the rank's chunks; R response tokens of the longest; T response tokens of all rows,
concatenated ("flat"). Given tokens of conversations are left out, so that the columns have no gaps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from megarl.algos.normalization import Groups
from megarl.data.packing import Chunks, V_co
from megarl.experience.records import SampleScores, StepContext
from megarl.types import Ragged, RolloutChunk, conversation_of


def response_mask(lengths: Sequence[int] | Tensor, device: torch.device | str = "cpu") -> Tensor:
    """[B, R] bool, True on the first ``lengths[i]`` columns of row i; [0, 0] without rows."""
    per_row = torch.as_tensor(lengths, dtype=torch.int64, device=device)
    width = int(per_row.max()) if len(per_row) else 0
    return torch.arange(width, device=device) < per_row[:, None]


def align(flat: Tensor, mask: Tensor) -> Tensor:
    """Pads [T] flat values to [B, R], 0 off the mask; gradients flow back to ``flat``."""
    assert len(flat) == int(mask.sum()), f"{len(flat)} values for {int(mask.sum())} response tokens"
    return flat.new_zeros(mask.shape).masked_scatter(mask, flat)


def flatten(aligned: Tensor, mask: Tensor) -> Tensor:
    """[T] values on the mask, row after row: the inverse of ``align``."""
    return aligned[mask]


class Selectable(Chunks[V_co], Protocol[V_co]):
    """A value per chunk; ``only`` selects some of the chunks."""

    def only(self, chunks: Iterable[int], /) -> Self: ...


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Columns by chunk; each has a float32 row per sample, with a value per response token.

    Args:
        old_logprobs: nats, by the actor before the update; None where the engines' take their place, or the update has
            them.
        ref_logprobs: nats.
        values: by the critic before the update.
        dense: raw scores by the reward model, see ``ModelEngine.token_scores``; None where a response has one score.
    """

    samples: SampleScores
    old_logprobs: Selectable[Ragged] | None
    ref_logprobs: Selectable[Ragged] | None
    values: Selectable[Ragged] | None
    dense: Selectable[Ragged] | None

    def only(self, chunks: Iterable[int]) -> Columns:
        """The columns of these chunks."""
        selected = tuple(chunks)
        columns: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: own.only(selected) for name, own in columns.items() if own is not None})


@dataclass(frozen=True, kw_only=True)
class PaddedBatch:
    """The samples of a rank.

    Args:
        mask: [B, R] bool, the response tokens.
        first: [B] bool, not a further branch of a conversation.
        lengths: [B] int64, the response tokens of all branches of a row's conversation.
        scored: [B] bool.
        actor_rows: [B] bool, the scored samples that the actor learns from.
        groups: the prompt of each row.
        scores: [B] float32, 0 without a score.
        sequence_advantages: [B] float32; None where advantages are estimated per token.
        rollout: [B, R] nats, by the engines.
        old: [B, R] nats, by the actor before the update, or the engines' in its place, also until the update.
        ref: [B, R] nats.
        values: [B, R], the critic's raw output.
        dense: [B, R] each, the reward model's raw scores before and after each token.
        turn_rewards: [B, R], the reward of each turn at its last token; None where the score has them.
        versions: [B, R] int64, version of the weights that sampled each token; 0 off the mask.
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
    versions: Tensor

    @property
    def scored_mask(self) -> Tensor:
        """[B, R] bool: the tokens of scored responses, over which statistics are taken."""
        return self.mask & self.scored[:, None]


def pad_batch(chunks: Mapping[int, RolloutChunk], columns: Columns, context: StepContext) -> PaddedBatch:
    """Pads the rows of all chunks, in their order; a rank without chunks gets the same columns without rows."""
    lengths = [int(n) for chunk in chunks.values() for n in chunk.rollout_logprobs.lengths]
    mask = response_mask(lengths)
    names = [conversation_of(name) for chunk in chunks.values() for name in chunk.sample_ids]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    of_rows = torch.tensor([numbers[name] for name in names], dtype=torch.int64)
    whole = torch.zeros(len(numbers), dtype=torch.int64).index_add(0, of_rows, mask.sum(-1))

    def padded(column: Chunks[Ragged] | None) -> Tensor | None:
        return None if column is None else align(_concatenate([column[i].values for i in chunks], np.float32), mask)

    samples = columns.samples.only(chunks)
    scores = _concatenate([samples.scores], np.float32)
    scored = scores.isfinite()
    advantages = samples.sequence_advantages
    rollout = padded({i: chunk.rollout_logprobs for i, chunk in chunks.items()})
    assert rollout is not None
    old = padded(columns.old_logprobs)
    return PaddedBatch(
        mask=mask,
        first=of_rows.diff(prepend=torch.tensor([-1])) > 0,
        lengths=whole[of_rows],
        scored=scored,
        actor_rows=scored & _concatenate([samples.actor_mask], np.bool_),
        groups=Groups(index=_concatenate([samples.groups], np.int64), count=context.groups),
        scores=torch.where(scored, scores, torch.zeros_like(scores)),
        sequence_advantages=None if advantages is None else _concatenate([advantages], np.float32),
        rollout=rollout,
        old=rollout if old is None else old,
        ref=padded(columns.ref_logprobs),
        values=padded(columns.values),
        dense=None if columns.dense is None else _padded_dense([columns.dense[i] for i in chunks], lengths, mask),
        turn_rewards=_turn_rewards(chunks, mask, context.turn_rewards),
        versions=align(_concatenate([_versions(chunk) for chunk in chunks.values()], np.int64), mask),
    )


def by_chunk(values: Tensor, mask: Tensor, chunks: Mapping[int, RolloutChunk]) -> dict[int, Ragged]:
    """Splits [B, R] values into a float32 column per chunk."""
    offsets = [chunk.rollout_logprobs.offsets for chunk in chunks.values()]
    parts = flatten(values, mask).float().split([int(of_chunk[-1]) for of_chunk in offsets])
    return {
        i: Ragged(values=part.numpy().copy(), offsets=of_chunk)
        for i, part, of_chunk in zip(chunks, parts, offsets, strict=True)
    }


def _turn_rewards(chunks: Mapping[int, RolloutChunk], mask: Tensor, factor: float | None) -> Tensor | None:
    """[B, R], the rewards of turns, times the factor.

    The last turn of a branch also gets the rewards of later branches of its conversation, for which it has prepared.
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
            total = rewards.sum() + later.get(conversation, 0.0)
            if len(rewards):
                rewards[-1] += later.get(conversation, 0.0)
            later[conversation] = total
            ends = torch.from_numpy(chunk.turns[row].astype(np.int64))
            placed[first + row, ends - 1] = factor * torch.from_numpy(rewards.astype(np.float32))
        first += len(chunk.sample_ids)
    return placed


def _versions(chunk: RolloutChunk) -> np.typing.NDArray[np.int64]:
    """[T], the version that sampled each token of a chunk."""
    spans = [span for of_row in chunk.versions for span in of_row]
    versions = np.array([span.version for span in spans], dtype=np.int64)
    return np.repeat(versions, [span.stop - span.start for span in spans])


def _padded_dense(columns: Sequence[Ragged], lengths: Sequence[int], mask: Tensor) -> tuple[Tensor, Tensor]:
    """[B, R] each, the scores before and after each token: a row begins with the former and ends with the latter."""
    rows = list(zip((row for column in columns for row in column), lengths, strict=True))
    sides = [row[:n] for row, n in rows], [row[len(row) - n :] for row, n in rows]
    before, after = (align(_concatenate(side, np.float32), mask) for side in sides)
    return before, after


def _concatenate(parts: Sequence[np.typing.NDArray[Any]], dtype: Any) -> Tensor:
    """Copies the parts, which may be views of read-only memory."""
    return torch.from_numpy(np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype))
