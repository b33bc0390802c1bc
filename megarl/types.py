"""The records that cross a boundary: frozen, keyword-only, free of torch.

Columns are numpy arrays, which a reader in another process maps from the object store without a copy.
Shape legend: N rows (samples) of a chunk, T all tokens of a column, P prompt tokens, R response tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

RoleName = Literal["actor", "critic", "reference", "reward"]
HeadName = Literal["lm", "value", "score"]

HEADS: Mapping[RoleName, HeadName] = {"actor": "lm", "reference": "lm", "critic": "value", "reward": "score"}
"""The head of each role's model."""


@dataclass(frozen=True, kw_only=True)
class RankCoords:
    """The coordinates of a rank in a role's layout, from 0."""

    tp: int
    dp: int
    pp: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a role is split over the ranks of its group.

    Ranks are numbered TP fastest, then DP, then PP (Megatron's default order), so that a TP group is
    on neighbouring devices. ``ep`` neighbouring replicas share the experts of a layer.

    Args:
        tp: ranks that share each matrix.
        pp: pipeline stages.
        dp: replicas.
        vpp: model chunks per pipeline stage (1: no interleaving).
        ep: replicas that share a layer's experts; it divides dp.
        sequence_parallel: activations between the TP regions are split along the sequence.

    Raises:
        ValueError: ep does not divide dp.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    vpp: int = 1
    ep: int = 1
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        if self.dp % self.ep:
            raise ValueError(f"ep {self.ep} does not divide dp {self.dp}; replicas share the experts")

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    def coords(self, rank: int) -> RankCoords:
        """The coordinates of a rank of the group."""
        return RankCoords(tp=rank % self.tp, dp=rank // self.tp % self.dp, pp=rank // (self.tp * self.dp))

    def rank(self, coords: RankCoords) -> int:
        """The rank with these coordinates."""
        return coords.tp + self.tp * (coords.dp + self.dp * coords.pp)

    def reports(self, rank: int) -> bool:
        """Whether a rank returns the results of its replica: TP 0 of the last stage does."""
        coords = self.coords(rank)
        return coords.tp == 0 and coords.pp == self.pp - 1

    def expert_rank(self, coords: RankCoords) -> int:
        """The index of the rank's part of each layer's experts, of ``ep`` equal parts in order."""
        return coords.dp % self.ep


@dataclass(frozen=True, kw_only=True)
class Ragged:
    """Rows of different lengths in one flat array.

    Args:
        values: [T], any dtype; the rows one after the other.
        offsets: [N + 1] int64; row i is ``values[offsets[i]:offsets[i + 1]]``.
    """

    values: npt.NDArray[Any]
    offsets: npt.NDArray[np.int64]

    @classmethod
    def from_rows(cls, rows: Iterable[Sequence[Any] | npt.NDArray[Any]], dtype: npt.DTypeLike) -> Ragged:
        """Concatenates rows; an empty iterable makes a column without rows."""
        arrays = [np.asarray(row, dtype=dtype) for row in rows]
        offsets = np.zeros(len(arrays) + 1, dtype=np.int64)
        np.cumsum([len(a) for a in arrays], out=offsets[1:])
        values = np.concatenate(arrays) if arrays else np.zeros(0, dtype=dtype)
        return cls(values=values, offsets=offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> npt.NDArray[Any]:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def __iter__(self) -> Iterator[npt.NDArray[Any]]:
        return (self[i] for i in range(len(self)))

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """[N] int64, values per row."""
        return np.diff(self.offsets)


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt as token ids.

    Args:
        prompt_id: unique in its data set, the same in every run.
        token_ids: P ids.
        fields: the other columns of its row (the reference answer, say), for reward functions.
    """

    prompt_id: str
    token_ids: tuple[int, ...]
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def key(self) -> str:
        """Unique in its data set."""
        return self.prompt_id

    @property
    def content(self) -> bytes:
        """Its tokens."""
        return np.array(self.token_ids, dtype=np.int32).tobytes()


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """One response to generate.

    Args:
        sample_id: unique among the requests of a step.
        seed: 64 bit.
        temperature: 0 takes the likeliest token each time; None is that of the configuration.
    """

    sample_id: str
    prompt: Prompt
    seed: int
    temperature: float | None = None


@dataclass(frozen=True, kw_only=True)
class WorkItem:
    """Neighbouring requests of a step, for one engine.

    Args:
        chunk: index of the chunk that the responses make, one row per request.
        requests: at least one.
    """

    chunk: int
    requests: tuple[SampleRequest, ...]


@dataclass(frozen=True, kw_only=True)
class VersionSpan:
    """Response tokens [start, stop) were sampled by ``engine_id`` under policy version ``version``."""

    start: int
    stop: int
    version: int
    engine_id: int


@dataclass(frozen=True, kw_only=True)
class RolloutChunk:
    """Some samples as an engine wrote them: the unit in which rollouts move.

    Args:
        sample_ids: N ids.
        prompt_ids: N rows of int32 token ids.
        response_ids: N rows of int32 token ids, the end token included.
        rollout_logprobs: N rows of float32 nats, one per response token, by the engine, under the distribution
            that it sampled from.
        finished: [N] bool; True where an end token or a stop text ended the response, False where the length limit did.
        versions: N tuples of spans that cover the response in order.
    """

    sample_ids: tuple[str, ...]
    prompt_ids: Ragged
    response_ids: Ragged
    rollout_logprobs: Ragged
    finished: npt.NDArray[np.bool_]
    versions: tuple[tuple[VersionSpan, ...], ...]


@dataclass(frozen=True, kw_only=True)
class TextChunk:
    """Some rows of a data set, tokenised: the unit in which demonstrations and preferences move.

    Args:
        sample_ids: N ids.
        prompt_ids, response_ids: N rows of int32 token ids, the end token included. The responses of a preference are
            neighbours, the best one first: of pairs, row 2i is the chosen response and row 2i + 1 the rejected one.
        margins: [N] float32, by which the best response of a row's preference is better; None where not known.
    """

    sample_ids: tuple[str, ...]
    prompt_ids: Ragged
    response_ids: Ragged
    margins: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True, kw_only=True)
class SampleInfo:
    """A sample as the driver knows it: ids and lengths, never tokens; ``finished`` is as in RolloutChunk.

    Args:
        chunk: index of the chunk that holds it.
        row: in that chunk.
    """

    sample_id: str
    prompt_id: str
    chunk: int
    row: int
    prompt_tokens: int
    response_tokens: int
    finished: bool

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.response_tokens


@dataclass(frozen=True, kw_only=True)
class SampleScores:
    """The scores of some samples; those of a chunk are neighbours, in the order of its rows.

    Args:
        chunks: [N] int64, the chunk of each sample.
        scores: [N] float32, of which the algorithm makes advantages; NaN without a score.
        groups: [N] int64, each sample's prompt, numbered within the step.
        sequence_advantages: [N] float32; None where the algorithm estimates advantages per token.
        actor_mask: [N] bool, False where the actor does not learn from a sample, though it has a score.
    """

    chunks: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float32]
    groups: npt.NDArray[np.int64]
    sequence_advantages: npt.NDArray[np.float32] | None
    actor_mask: npt.NDArray[np.bool_]

    def only(self, chunks: Iterable[int]) -> SampleScores:
        """The samples of these chunks, in their order."""
        rows = np.concatenate([np.zeros(0, np.int64), *(np.flatnonzero(self.chunks == chunk) for chunk in chunks)])
        advantages = self.sequence_advantages
        return SampleScores(
            chunks=self.chunks[rows],
            scores=self.scores[rows],
            groups=self.groups[rows],
            sequence_advantages=None if advantages is None else advantages[rows],
            actor_mask=self.actor_mask[rows],
        )


@dataclass(frozen=True, kw_only=True)
class TokenRewardScale:
    """Scale of a reward model that scores every token: gain * raw + bias; with ``differences``, of its increments."""

    gain: float
    bias: float
    differences: bool


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """What building a step's experience needs beside the samples.

    Args:
        kl_coef: of the KL penalty, per nat.
        version: of the actor's weights before the update.
        groups: number of prompts.
        value_norm: moments of the value normaliser; None without one.
        dense: of a reward model that scores every token; None where responses have one score.
    """

    kl_coef: float
    version: int
    groups: int
    value_norm: Mapping[str, float] | None = None
    dense: TokenRewardScale | None = None


@dataclass(frozen=True, kw_only=True)
class ExperienceReport:
    """Metrics of a step's experience, over all replicas, and the new moments of the value normaliser."""

    metrics: Mapping[str, float]
    value_norm: Mapping[str, float] | None


@dataclass(frozen=True, kw_only=True)
class ExperienceChunk:
    """What an update reads of the samples of one chunk; every column has one value per response token.

    Args:
        sample_ids: N ids.
        prompt_ids, response_ids: N rows of int32 token ids.
        old_logprobs: float32 nats, by the actor before the update, or by the engines where those stand for them.
        ref_logprobs: float32 nats, by the reference; None where the update has no penalty for leaving it.
        rollout_logprobs: float32 nats, by the engines; None where the update does not look at them.
        proximal_weights: float32, how far the old policy is from the engines' to the one in training; None where
            ``old_logprobs`` are of the old policy.
        old_values: float32, by the critic before the update; None without one.
        advantages, returns: float32; returns is None without a critic, and in the units of its values.
        weights: float32, what the terms of the policy loss are multiplied with; None where nothing is.
        actor_mask: float32, 1 where the actor learns, else 0; None where it learns from all tokens.
        critic_mask: likewise, of the critic.
    """

    sample_ids: tuple[str, ...]
    prompt_ids: Ragged
    response_ids: Ragged
    old_logprobs: Ragged
    ref_logprobs: Ragged | None = None
    rollout_logprobs: Ragged | None = None
    proximal_weights: Ragged | None = None
    old_values: Ragged | None = None
    advantages: Ragged
    returns: Ragged | None = None
    weights: Ragged | None = None
    actor_mask: Ragged | None = None
    critic_mask: Ragged | None = None


@dataclass(frozen=True, kw_only=True)
class PackRow:
    """A sample in a pack: its chunk and row, and its lengths."""

    chunk: int
    row: int
    prompt_tokens: int
    response_tokens: int

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.response_tokens


@dataclass(frozen=True, kw_only=True)
class RankSchedule:
    """The micro-batches of one DP rank, in order.

    The number of packs, ``pack_tokens`` and the totals, which are a loss's global denominators, are the same on every
    DP rank.

    Args:
        packs: rows of each micro-batch; one without rows is a masked filler.
        pack_tokens: to which every pack is padded.
        total_rows: samples in the pass, over all ranks.
        total_sequences: samples with a response token, over all ranks.
        total_response_tokens: over all ranks.
        rows_per_unit: rows that stay neighbours, in one pack and in order: 2 for preference pairs.
    """

    packs: tuple[tuple[PackRow, ...], ...]
    pack_tokens: int
    total_rows: int
    total_sequences: int
    total_response_tokens: int
    rows_per_unit: int = 1

    @property
    def chunks(self) -> list[int]:
        """Those that the rank reads, in order."""
        return sorted({row.chunk for rows in self.packs for row in rows})


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The micro-batches of one pass, by DP rank."""

    ranks: tuple[RankSchedule, ...]
