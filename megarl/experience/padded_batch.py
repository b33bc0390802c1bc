"""The columns of a rank's samples, and the response-aligned [B, R] tensors that are made of them.

Shape legend: B rows, the samples of all chunks of the rank; R response tokens of the longest; T response tokens of all
rows one after the other ("flat").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from megarl.algos.normalization import Groups
from megarl.config.schema import Algo
from megarl.data.packing import Chunks
from megarl.types import ExperienceTerms, Ragged, RolloutChunk, SampleFacts


def response_mask(lengths: Sequence[int] | Tensor, device: torch.device | str = "cpu") -> Tensor:
    """[B, R] bool, True on the first ``lengths[i]`` columns of row i; [0, 0] without rows."""
    per_row = torch.as_tensor(lengths, dtype=torch.int64, device=device)
    width = int(per_row.max()) if len(per_row) else 0
    return torch.arange(width, device=device) < per_row[:, None]


def align(flat: Tensor, mask: Tensor) -> Tensor:
    """[B, R] of the flat values, 0 off the mask; gradients flow back to ``flat``.

    Args:
        flat: [T], T the True entries of the mask.
        mask: [B, R] bool.
    """
    assert len(flat) == int(mask.sum()), f"{len(flat)} values for {int(mask.sum())} response tokens"
    return flat.new_zeros(mask.shape).masked_scatter(mask, flat)


def flatten(aligned: Tensor, mask: Tensor) -> Tensor:
    """[T] of the [B, R] values on the mask, row after row: the inverse of align."""
    return aligned[mask]


V_co = TypeVar("V_co", covariant=True)


class Selectable(Protocol[V_co]):
    """Something per chunk, of which a part of the chunks can be taken; fetched when it is asked for, perhaps."""

    def __getitem__(self, chunk: int, /) -> V_co: ...

    def only(self, chunks: Iterable[int], /) -> Self: ...


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Columns by chunk; each has a float32 row per sample, with a value per response token.

    Args:
        samples: what the driver knows of the samples.
        old_logprobs: nats, by the actor before the update; None where the engines' stand for them.
        ref_logprobs: nats, by the reference; None without one.
        values: by the critic before the update; None without one.
        dense: raw scores by the reward model, one more than response tokens: before the first one, and after each.
            None where a response has one score.
    """

    samples: Mapping[int, SampleFacts]
    old_logprobs: Selectable[Ragged] | None
    ref_logprobs: Selectable[Ragged] | None
    values: Selectable[Ragged] | None
    dense: Selectable[Ragged] | None

    def only(self, chunks: Iterable[int]) -> Columns:
        """Those of these chunks alone."""
        own = tuple(chunks)
        parts: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        tokens = {
            name: None if column is None else column.only(own) for name, column in parts.items() if name != "samples"
        }
        return Columns(samples={chunk: self.samples[chunk] for chunk in own}, **tokens)


@dataclass(frozen=True, kw_only=True)
class Aligned:
    """What is known of the samples of a rank.

    Args:
        mask: [B, R] bool, the response tokens.
        scored: [B] bool, False where there is no score.
        learnt: [B] bool, False where the policy learns nothing, be it without a score.
        groups: the prompt of each row.
        scores: [B] float32, 0 where there is none.
        outcomes: [B] float32; None where advantages are of tokens.
        rollout: [B, R] nats, by the engines.
        old: [B, R] nats, by the actor before the update; the engines' where those stand for them.
        ref: [B, R] nats, by the reference; None without one.
        values: [B, R], by the critic, as it says them; None without one.
        dense: [B, R + 1], by the reward model before the first token and after each; None where responses have one.
        versions: [B, R] int64, of the weights that sampled each token; 0 off the mask.
    """

    mask: Tensor
    scored: Tensor
    learnt: Tensor
    groups: Groups
    scores: Tensor
    outcomes: Tensor | None
    rollout: Tensor
    old: Tensor
    ref: Tensor | None
    values: Tensor | None
    dense: Tensor | None
    versions: Tensor

    @property
    def counted(self) -> Tensor:
        """[B, R] bool: the tokens of responses with a score, over which statistics are taken."""
        return self.mask & self.scored[:, None]


def aligned(chunks: Mapping[int, RolloutChunk], columns: Columns, algo: Algo, terms: ExperienceTerms) -> Aligned:
    """The rows of all chunks, in their order; a rank without chunks has the same columns as the others."""
    lengths = [int(n) for chunk in chunks.values() for n in chunk.response_ids.lengths]
    mask = response_mask(lengths)

    def tokens(column: Chunks[Ragged] | None, mask: Tensor = mask) -> Tensor | None:
        return None if column is None else align(_joined([column[i].values for i in chunks], np.float32), mask)

    facts = [columns.samples[i] for i in chunks]
    scores = _joined([of_chunk.scores for of_chunk in facts], np.float32)
    scored = scores.isfinite()
    outcomes = [of_chunk.outcomes for of_chunk in facts if of_chunk.outcomes is not None]
    rollout = tokens({i: chunk.rollout_logprobs for i, chunk in chunks.items()})
    assert rollout is not None
    old = tokens(columns.old_logprobs)
    return Aligned(
        mask=mask,
        scored=scored,
        learnt=scored & _joined([of_chunk.learnt for of_chunk in facts], np.bool_),
        groups=Groups(index=_joined([of_chunk.groups for of_chunk in facts], np.int64), count=terms.groups),
        scores=torch.where(scored, scores, torch.zeros_like(scores)),
        outcomes=None if algo.of_tokens else _joined(outcomes, np.float32),
        rollout=rollout,
        old=rollout if old is None else old,
        ref=tokens(columns.ref_logprobs),
        values=tokens(columns.values),
        dense=tokens(columns.dense, response_mask([n + 1 for n in lengths])),
        versions=align(_joined([_versions(chunk) for chunk in chunks.values()], np.int64), mask),
    )


def by_chunk(values: Tensor, mask: Tensor, chunks: Mapping[int, RolloutChunk]) -> dict[int, Ragged]:
    """[B, R] of all chunks' rows -> one float32 column per chunk."""
    offsets = [chunk.response_ids.offsets for chunk in chunks.values()]
    parts = flatten(values, mask).float().split([int(own[-1]) for own in offsets])
    return {
        i: Ragged(values=part.numpy().copy(), offsets=own) for i, part, own in zip(chunks, parts, offsets, strict=True)
    }


def _versions(chunk: RolloutChunk) -> np.typing.NDArray[np.int64]:
    """Of each response token of a chunk."""
    spans = [span for of_row in chunk.versions for span in of_row]
    return np.repeat(
        np.array([span.version for span in spans], dtype=np.int64), [span.stop - span.start for span in spans]
    )


def _joined(parts: Sequence[np.typing.NDArray[Any]], dtype: Any) -> Tensor:
    """One copy of all parts, which may be views of read-only memory."""
    return torch.from_numpy(np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype))
