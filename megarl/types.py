"""The records that cross a boundary: frozen, keyword-only, free of torch.

Ragged columns are numpy so that a reader in another process maps them from the object store without a copy.
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
"""What each role's model has on top."""


@dataclass(frozen=True, kw_only=True)
class RankCoords:
    """Where one rank stands in a role's layout; each index counts from 0."""

    tp: int
    dp: int
    pp: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a role is split over the ranks of its group.

    Ranks are numbered TP fastest, then DP, then PP (Megatron's default order), so that a TP group is
    on neighbouring devices. Neighbouring replicas share the experts of a layer: each holds a part of them.

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
        """The rank in the group that has these coordinates."""
        return coords.tp + self.tp * (coords.dp + self.dp * coords.pp)

    def expert_rank(self, coords: RankCoords) -> int:
        """Which part of each layer's experts a rank has, of ``ep`` equal ones in order."""
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
        fields: the other columns of its row (the reference answer, say), for rule-based rewards.
    """

    prompt_id: str
    token_ids: tuple[int, ...]
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def key(self) -> str:
        """What tells it from the other items of its data set."""
        return self.prompt_id

    @property
    def content(self) -> bytes:
        """Its tokens."""
        return np.array(self.token_ids, dtype=np.int32).tobytes()


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """One answer to generate.

    Args:
        sample_id: which of the prompt's samples of the step it is.
        prompt: to answer.
        seed: of its sampling, 64 bit.
        temperature: of its sampling; 0 takes the likeliest token each time, None is the rollouts' own.
    """

    sample_id: str
    prompt: Prompt
    seed: int
    temperature: float | None = None


@dataclass(frozen=True, kw_only=True)
class WorkItem:
    """Neighbouring requests of a step, which one engine answers.

    Args:
        chunk: index of the chunk that the answers make, one row per request.
        requests: one at least.
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
    """Some samples as the engine wrote them: the unit in which rollouts move.

    Args:
        sample_ids: N ids.
        prompt_ids: N rows of int32 token ids.
        response_ids: N rows of int32 token ids, the end token included.
        rollout_logprobs: N rows of float32 nats, one per response token, by the engine, under the distribution
            that it sampled from.
        finished: [N] bool; True where an end token or a stop text ended the answer, False where the length limit did.
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
        margins: [N] float32, by which the best response of a row's preference is better; None where nothing says so.
    """

    sample_ids: tuple[str, ...]
    prompt_ids: Ragged
    response_ids: Ragged
    margins: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True, kw_only=True)
class SampleInfo:
    """What the driver knows of a sample: ids and lengths, never tokens.

    Args:
        chunk: index of the chunk object that holds it.
        row: its row in that chunk.
        prompt_tokens, response_tokens: lengths.
        finished: see RolloutChunk.
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
class SampleFacts:
    """What the driver knows of the samples of one chunk when their experience is built.

    Args:
        scores: [N] float32, as the algorithm takes them; not a number where there is none.
        groups: [N] int64, the number of each sample's prompt among those of the step.
        outcomes: [N] float32, an advantage per sample; None where advantages are of tokens.
        learnt: [N] bool, False where the policy is to learn nothing of a sample, though it has a score.
    """

    scores: npt.NDArray[np.float32]
    groups: npt.NDArray[np.int64]
    outcomes: npt.NDArray[np.float32] | None
    learnt: npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class DenseScale:
    """What the reward model's score after a token is worth: gain * raw + bias; with ``differences``, what it added."""

    gain: float
    bias: float
    differences: bool


@dataclass(frozen=True, kw_only=True)
class ExperienceTerms:
    """What the driver says of a whole step when its experience is built.

    Args:
        kl_coef: reward or loss per nat.
        version: of the actor's weights before the update.
        groups: prompts of the step.
        value_norm: the moments that the values are normalised with, as the value normaliser keeps them; None without.
        dense: of the reward model's scores after every token; None where a response has one score.
    """

    kl_coef: float
    version: int
    groups: int
    value_norm: Mapping[str, float] | None = None
    dense: DenseScale | None = None


@dataclass(frozen=True, kw_only=True)
class ExperienceReport:
    """What the driver hears of a step's experience: metrics of all of it, and the moments of the value normaliser."""

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
        kept: float32, 0 where the actor learns nothing, 1 elsewhere; None where it learns from all.
        value_kept: likewise, of the critic.
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
    kept: Ragged | None = None
    value_kept: Ragged | None = None


@dataclass(frozen=True, kw_only=True)
class PackRow:
    """A sample in a pack: where it lies and how long it is (tokens)."""

    chunk: int
    row: int
    prompt_tokens: int
    response_tokens: int

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.response_tokens


@dataclass(frozen=True, kw_only=True)
class RankSchedule:
    """The micro-batches of one DP rank, in order; a pack without rows is a masked filler.

    Args:
        packs: rows of each micro-batch; the same number of packs on every DP rank.
        pack_tokens: every pack is padded to this many tokens; the same on every DP rank.
        total_rows: samples in the pass, over all ranks.
        total_sequences: those of them with a response token.
        total_response_tokens: response tokens in the pass, over all ranks. These are a loss's global denominators.
        rows_per_unit: rows that stay neighbours, in one pack and in order: 2 where they are preference pairs.
    """

    packs: tuple[tuple[PackRow, ...], ...]
    pack_tokens: int
    total_rows: int
    total_sequences: int
    total_response_tokens: int
    rows_per_unit: int = 1

    @property
    def chunks(self) -> list[int]:
        """The chunks that the rank reads, in order."""
        return sorted({row.chunk for rows in self.packs for row in rows})


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Who does what in one pass: one RankSchedule per DP rank, of which a rank is sent its own."""

    ranks: tuple[RankSchedule, ...]
