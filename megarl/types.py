"""The records that cross a boundary: frozen, keyword-only, free of torch.

Columns are numpy arrays, which a reader in another process maps from the object store without a copy.
Shape legend: N rows (samples) of a chunk, T all tokens of a column.
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
    """A rank's coordinates in a role's layout, from 0."""

    tp: int
    dp: int
    pp: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a role is split over the ranks of its group.

    Ranks are numbered TP fastest, then DP, then PP (Megatron's default order): a TP group is on neighbouring devices.

    Args:
        vpp: model chunks per pipeline stage (1: no interleaving).
        ep: neighbouring replicas that share a layer's experts; it divides dp, or ValueError is raised.
        sequence_parallel: activations between the TP regions are split along the sequence.
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
        return RankCoords(tp=rank % self.tp, dp=rank // self.tp % self.dp, pp=rank // (self.tp * self.dp))

    def rank(self, coords: RankCoords) -> int:
        return coords.tp + self.tp * (coords.dp + self.dp * coords.pp)

    def reports(self, rank: int) -> bool:
        """Returns whether a rank returns the results of its replica: TP 0 of the last stage does."""
        coords = self.coords(rank)
        return coords.tp == 0 and coords.pp == self.pp - 1

    def expert_rank(self, coords: RankCoords) -> int:
        """Returns which of the ``ep`` equal parts of each layer's experts the rank has."""
        return coords.dp % self.ep


@dataclass(frozen=True, kw_only=True)
class Ragged:
    """Rows of different lengths in one flat array.

    Args:
        values: [T], any dtype.
        offsets: [N + 1] int64; row i is ``values[offsets[i]:offsets[i + 1]]``.
    """

    values: npt.NDArray[Any]
    offsets: npt.NDArray[np.int64]

    @classmethod
    def from_rows(cls, rows: Iterable[Sequence[Any] | npt.NDArray[Any]], dtype: npt.DTypeLike) -> Ragged:
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


TokenValues = dict[tuple[int, int], dict[str, npt.NDArray[np.float32]]]
"""Values of each response token by name, by the sample's chunk and row."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt as token ids.

    Args:
        prompt_id: unique in its data set, the same in every run.
        fields: the other columns of its row (the reference answer, say), for reward functions.
        messages: of a chat, for reward functions; None of other prompts.
    """

    prompt_id: str
    token_ids: tuple[int, ...]
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    messages: Sequence[Mapping[str, Any]] | None = None

    @property
    def key(self) -> str:
        return self.prompt_id

    @property
    def content(self) -> bytes:
        return np.array(self.token_ids, dtype=np.int32).tobytes()


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """One response to generate.

    Args:
        sample_id: unique among the requests of a step.
        seed: 64 bit.
        temperature, max_new_tokens: None is that of the configuration; temperature 0 is greedy.
    """

    sample_id: str
    prompt: Prompt
    seed: int
    temperature: float | None = None
    max_new_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class WorkItem:
    """Neighbouring requests of a step, the rows of chunk ``chunk``; ``engine`` has the beginning of their prompts."""

    chunk: int
    requests: tuple[SampleRequest, ...]
    engine: int | None = None


@dataclass(frozen=True, kw_only=True)
class VersionSpan:
    """Tokens [start, stop) of those sampled of a response, by ``engine_id`` under policy version ``version``."""

    start: int
    stop: int
    version: int
    engine_id: int


@dataclass(frozen=True, kw_only=True)
class RolloutChunk:
    """N samples as an engine wrote them: the unit in which rollouts move.

    The response of a conversation of several turns is all that follows its first prompt: what was sampled, and what was
    given in between (by a template, a tool or an environment). Given tokens are attended to, and otherwise exist in
    ``response_ids`` and ``loss_mask`` alone: all columns of tokens have one value per sampled token.

    Args:
        prompt_ids, response_ids: N rows of int32 token ids; responses include the end token.
        rollout_logprobs: N rows of float32 nats, one per sampled token, under the distribution sampled from.
        finished: [N] bool; True where an end token or a stop text ended the response, False where the length limit did.
        versions: N tuples of spans that cover the sampled tokens in order.
        loss_mask: N rows of bool, by id of the response, whether it was sampled; None where all were.
        rewards: [N] float32 by the environment, NaN of a conversation that failed.
        turns, turn_rewards: N rows of int32 and float32: the sampled tokens up to the end of each turn, and its reward.
    """

    sample_ids: tuple[str, ...]
    prompt_ids: Ragged
    response_ids: Ragged
    rollout_logprobs: Ragged
    finished: npt.NDArray[np.bool_]
    versions: tuple[tuple[VersionSpan, ...], ...]
    loss_mask: Ragged | None = None
    rewards: npt.NDArray[np.float32] | None = None
    turns: Ragged | None = None
    turn_rewards: Ragged | None = None


@dataclass(frozen=True, kw_only=True)
class TextChunk:
    """N tokenised rows of a data set: the unit in which demonstrations and preferences move.

    Args:
        prompt_ids, response_ids: N rows of int32 token ids, the end token included. The responses of a preference are
            neighbours, the best one first: of pairs, row 2i is the chosen response and row 2i + 1 the rejected one.
        margins: [N] float32, by which the best response of a row's preference is better; None where unknown.
    """

    sample_ids: tuple[str, ...]
    prompt_ids: Ragged
    response_ids: Ragged
    margins: npt.NDArray[np.float32] | None = None

    @property
    def loss_mask(self) -> None:
        """Returns None: a text is learned as a whole."""


@dataclass(frozen=True, kw_only=True)
class SampleInfo:
    """A sample as the driver knows it: ids, lengths and its place in a chunk, never tokens.

    Args:
        response_tokens: that were sampled; what counts in losses, lengths and limits.
        given_tokens: between them, which only cost compute.
        reward: by the environment, NaN of a conversation that failed; None without one.
    """

    sample_id: str
    prompt_id: str
    chunk: int
    row: int
    prompt_tokens: int
    response_tokens: int
    finished: bool
    given_tokens: int = 0
    reward: float | None = None

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.response_tokens + self.given_tokens


@dataclass(frozen=True, kw_only=True)
class SampleScores:
    """The scores of samples; those of a chunk are neighbours, in the order of its rows.

    Args:
        chunks: [N] int64.
        scores: [N] float32; NaN without a score.
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
        """Returns the samples of these chunks, in the chunks' order."""
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
    """The scale of a reward model that scores every token: gain * raw + bias; ``differences`` scales increments."""

    gain: float
    bias: float
    differences: bool


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """A step's inputs of the experience beside the samples.

    Args:
        kl_coef: of the KL penalty, per nat.
        version: of the actor's weights before the update; those that sampled are at most ``max_staleness`` older.
        value_norm: moments of the value normaliser; None without one.
        dense: of a reward model that scores every token; None where responses have one score.
        turn_rewards: factor of the rewards of turns; None where the score has them.
    """

    kl_coef: float
    version: int
    groups: int
    max_staleness: int = 0
    value_norm: Mapping[str, float] | None = None
    dense: TokenRewardScale | None = None
    turn_rewards: float | None = None


@dataclass(frozen=True, kw_only=True)
class ExperienceReport:
    """Metrics of a step's experience, over all replicas, and the new moments of the value normaliser."""

    metrics: Mapping[str, float]
    value_norm: Mapping[str, float] | None


@dataclass(frozen=True, kw_only=True)
class ExperienceChunk:
    """The samples of one chunk for an update; every float32 column has one value per sampled token.

    Args:
        prompt_ids, response_ids, loss_mask: those of the ``RolloutChunk``.
        old_logprobs: nats, by the actor before the update, or by the engines in their place; None where they are those
            of the update itself.
        ref_logprobs: nats, by the reference; None where the loss has no KL penalty.
        rollout_logprobs: nats, by the engines; None where the loss does not read them.
        proximal_weights: position of the old policy between the engines' (0) and the one in training (1); None where
            ``old_logprobs`` are the old policy's.
        old_values: by the critic before the update; None without one.
        returns: in the units of the critic's values; None without one.
        weights: factors of the policy loss's terms; None where there are none.
        actor_mask: 1 where the actor learns, else 0; None where it learns from all tokens.
        scored_mask: 1 on the tokens of scored responses, of which the critic learns, else 0; None where all are.
        ages: versions between the weights that sampled a token and the actor's; None where the loss does not read them.
    """

    sample_ids: tuple[str, ...]
    prompt_ids: Ragged
    response_ids: Ragged
    old_logprobs: Ragged | None
    ref_logprobs: Ragged | None = None
    rollout_logprobs: Ragged | None = None
    proximal_weights: Ragged | None = None
    old_values: Ragged | None = None
    advantages: Ragged
    returns: Ragged | None = None
    weights: Ragged | None = None
    actor_mask: Ragged | None = None
    scored_mask: Ragged | None = None
    ages: Ragged | None = None
    loss_mask: Ragged | None = None


@dataclass(frozen=True, kw_only=True)
class PackRow:
    """A sample in a pack: its chunk and row, and its lengths as in ``SampleInfo``."""

    chunk: int
    row: int
    prompt_tokens: int
    response_tokens: int
    given_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.response_tokens + self.given_tokens


@dataclass(frozen=True, kw_only=True)
class RankSchedule:
    """The micro-batches of one DP rank, in order.

    The number of packs, ``pack_tokens`` and the totals are the same on every DP rank.

    Args:
        packs: rows of each micro-batch; one without rows is a masked filler.
        pack_tokens: to which every pack is padded.
        total_rows, total_sequences, total_response_tokens: over all ranks, the global denominators of losses: samples,
            samples with a response token, and response tokens, given ones not counted.
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
        return sorted({row.chunk for rows in self.packs for row in rows})


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The micro-batches of one pass, by DP rank."""

    ranks: tuple[RankSchedule, ...]
