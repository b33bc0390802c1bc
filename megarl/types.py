"""The records that cross a boundary: frozen, keyword-only, free of torch.

Columns are numpy arrays, which a reader in another process maps from the object store
without a copy.
Shape legend: N rows (samples) of a chunk, T all tokens of a column.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

RoleName = Literal["actor", "critic", "reference", "reward"]
HeadName = Literal["lm", "value", "score"]

HEADS: Mapping[RoleName, HeadName] = {"actor": "lm", "reference": "lm", "critic": "value", "reward": "score"}
"""The head of each role's model."""


FloatArray = npt.NDArray[np.float32]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
AnyArray = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class RankCoords:
    """A rank's coordinates in a role's layout, from 0."""

    tp: int
    dp: int
    pp: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a role is split over the ranks of its group.

    Ranks are numbered TP fastest, then DP, then PP (Megatron's default order): a TP group is on
    neighboring devices.

    Args:
        vpp: model chunks per pipeline stage (1: no interleaving).
        ep: neighboring replicas that share a layer's experts; must divide dp, or
            ValueError is raised.
        sequence_parallel: whether activations between the TP regions are split along the sequence.
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
        """Whether a rank returns the results of its replica: TP 0 of the last stage does."""
        coords = self.coords(rank)
        return coords.tp == 0 and coords.pp == self.pp - 1

    def expert_rank(self, coords: RankCoords) -> int:
        """Returns the index of the rank's part, of the ``ep`` equal parts of each layer's experts."""
        return coords.dp % self.ep


@dataclass(frozen=True, kw_only=True)
class Ragged:
    """Rows of different lengths in one flat array.

    Args:
        values: [T], any dtype.
        offsets: [N + 1] int64; row i is ``values[offsets[i]:offsets[i + 1]]``.
    """

    values: AnyArray
    offsets: Int64Array

    @classmethod
    def from_rows(cls, rows: Iterable[Sequence[Any] | AnyArray], dtype: npt.DTypeLike) -> Ragged:
        arrays = [np.asarray(row, dtype=dtype) for row in rows]
        offsets = np.fromiter(accumulate(map(len, arrays), initial=0), np.int64, len(arrays) + 1)
        values = np.concatenate(arrays) if arrays else np.zeros(0, dtype=dtype)
        return cls(values=values, offsets=offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> AnyArray:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def __iter__(self) -> Iterator[AnyArray]:
        return (self[i] for i in range(len(self)))

    @property
    def lengths(self) -> Int64Array:
        """[N] int64, values per row."""
        return np.diff(self.offsets)


TokenValues = dict[tuple[int, int], dict[str, FloatArray]]
"""Values of each response token by name, by the sample's chunk and row."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt as token ids.

    Args:
        prompt_id: id, unique in its data set and the same in every run.
        fields: other columns of its row (the reference answer, say), for reward functions.
        messages: messages of a chat, for reward functions; None for other prompts.
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
        sample_id: id, unique among the requests of a step.
        seed: 64-bit seed.
        temperature, max_new_tokens: None: as configured; temperature 0 is greedy.
    """

    sample_id: str
    prompt: Prompt
    seed: int
    temperature: float | None = None
    max_new_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class WorkItem:
    """Neighboring requests of a step, the rows of chunk ``chunk``."""

    chunk: int
    requests: tuple[SampleRequest, ...]


@dataclass(frozen=True, kw_only=True)
class VersionSpan:
    """Sampled tokens [start, stop) of a response, by ``engine_id`` under policy version ``version``."""

    start: int
    stop: int
    version: int
    engine_id: int


@dataclass(frozen=True, kw_only=True)
class RolloutChunk:
    """N samples as an engine wrote them: the unit in which rollouts move.

    The response of a conversation of several turns is all that follows its first prompt: sampled
    tokens, and those given in between by a template, a tool or an environment. Given tokens are
    attended to, and otherwise exist in ``response_ids`` and ``loss_mask`` alone: all columns of
    tokens have one value per sampled token.

    Args:
        prompt_ids, response_ids: N rows of int32 token ids; responses include the end token.
        rollout_logprobs: N rows of float32 nats, one per sampled token, under the
            distribution sampled from.
        finished: [N] bool; True where an end token or a stop text ended the response, False where
            the length limit did.
        versions: N tuples of spans that cover the sampled tokens in order.
        loss_mask: N rows of bool, True where a response token was sampled; None where all were.
        rewards: [N] float32, rewards of the environment; NaN for a failed conversation.
        turns, turn_rewards: N rows of int32 and float64: the sampled tokens up to the end of each
            turn, and its reward.
        kept_counts: N rows of int32, number of ids from which each token was sampled; 0 for too
            many of them, where the log-probability is 0 too. None where the ids are not recorded.
        kept_ids: N rows of int32, these ids, those of one token after those of another.
        routes: N rows of uint8 or uint16, the experts of every position of prompt and response but
            the last: [positions, layers with experts, experts of a token], flattened. The largest
            number stands for positions of which the engine has no record.
            None where they are not recorded.
    """

    sample_ids: tuple[str, ...]
    prompt_ids: Ragged
    response_ids: Ragged
    rollout_logprobs: Ragged
    finished: BoolArray
    versions: tuple[tuple[VersionSpan, ...], ...]
    loss_mask: Ragged | None = None
    rewards: FloatArray | None = None
    turns: Ragged | None = None
    turn_rewards: Ragged | None = None
    kept_counts: Ragged | None = None
    kept_ids: Ragged | None = None
    routes: Ragged | None = None


@dataclass(frozen=True, kw_only=True)
class SampledTurn:
    """A turn of a conversation as an engine sampled it, with the columns of a ``RolloutChunk``'s row."""

    token_ids: tuple[int, ...]
    logprobs: FloatArray
    finished: bool
    versions: tuple[VersionSpan, ...]
    kept_counts: Int32Array | None = None
    kept_ids: Int32Array | None = None

    @classmethod
    def of(cls, chunk: RolloutChunk, row: int = 0) -> SampledTurn:
        return cls(
            token_ids=tuple(chunk.response_ids[row].tolist()),
            logprobs=chunk.rollout_logprobs[row],
            finished=bool(chunk.finished[row]),
            versions=chunk.versions[row],
            kept_counts=None if chunk.kept_counts is None else chunk.kept_counts[row],
            kept_ids=None if chunk.kept_ids is None else chunk.kept_ids[row],
        )


@dataclass(frozen=True)
class Pickled[T]:
    """A value on its way through processes that do not read it but copy its bytes."""

    data: bytes

    @classmethod
    def of(cls, value: T) -> Pickled[T]:
        return cls(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))

    def value(self) -> T:
        return pickle.loads(self.data)


@dataclass(frozen=True, kw_only=True)
class TurnAnswer:
    """The answer to the request with a number; ``tokens`` counts the sampled ones."""

    number: int
    tokens: int
    turn: Pickled[SampledTurn]


@dataclass(frozen=True, kw_only=True)
class TextChunk:
    """N tokenized rows of a data set: the unit in which demonstrations and preferences move.

    Args:
        prompt_ids, response_ids: N rows of int32 token ids, the end token included. The responses
            of a preference are
            neighbors, the best one first: of pairs, row 2i is the chosen response and row 2i + 1
                the rejected one.
        margins: [N] float32, margin of the best response in a row's preference; None where unknown.
        desirable: [N] float32, 1 for a response that is desirable, else 0; None where unknown.
        ref_logprobs: [N] float32, log-probability of each whole response under the reference, nats;
            None without a reference.
        kl: divergence of the policy from the reference, see ``algos.direct_preference``; None where
            no loss reads it.
    """

    sample_ids: tuple[str, ...]
    prompt_ids: Ragged
    response_ids: Ragged
    margins: FloatArray | None = None
    desirable: FloatArray | None = None
    ref_logprobs: FloatArray | None = None
    kl: float | None = None

    @property
    def loss_mask(self) -> None:
        """Returns None: a text is learned as a whole."""

    @property
    def kept_counts(self) -> None:
        """Returns None: no engine sampled a text."""

    @property
    def kept_ids(self) -> None:
        """Returns None: no engine sampled a text."""

    @property
    def routes(self) -> None:
        """Returns None: no engine computed a text."""


@dataclass(frozen=True, kw_only=True)
class ConversationOutcome:
    """How a conversation with an environment went.

    Args:
        turns: number of the model's turns.
        truncated: whether a limit ended it.
        failure: reason why it has no score, if any.
        metrics: metrics of the environment, the last of each name.
        limit: setting that ended it, or `environment`, if it is truncated.
    """

    turns: int
    truncated: bool
    failure: str | None
    metrics: Mapping[str, float]
    limit: str | None = None


def conversation_of(sample_id: str) -> str:
    """Returns the sample id of the first branch of a sample's conversation."""
    head, mark, branch = sample_id.rpartition("#")
    return head if mark and branch.isdigit() else sample_id


@dataclass(frozen=True, kw_only=True)
class SampleInfo:
    """A sample as the driver knows it: ids, lengths and its place in a chunk, never tokens.

    Args:
        response_tokens: number of sampled tokens, which count in losses, lengths and limits.
        given_tokens: number of given tokens between them, which only cost compute.
        reward: reward of the environment; NaN for a failed conversation, None without
            an environment.
        outcome: outcome of a conversation that was held in this run.
        teacher: name of its teacher, where there are several.

    A conversation whose chat template rewrites earlier turns has several rows, its branches, as
    neighbors; the ids of all but the first end in # and a number.
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
    outcome: ConversationOutcome | None = None
    teacher: str = ""

    @property
    def conversation(self) -> str:
        """The sample id of the first branch."""
        return conversation_of(self.sample_id)

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.response_tokens + self.given_tokens


@dataclass(frozen=True, kw_only=True)
class PackRow:
    """A sample in a pack: its chunk and row, its lengths and its teacher as in ``SampleInfo``.

    ``sequence_tokens`` counts the sampled tokens of all branches of its conversation; None: the row's.
    """

    chunk: int
    row: int
    prompt_tokens: int
    response_tokens: int
    given_tokens: int = 0
    sequence_tokens: int | None = None
    teacher: str = ""

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.response_tokens + self.given_tokens


@dataclass(frozen=True, kw_only=True)
class RankSchedule:
    """The micro-batches of one DP rank, in order.

    The number of packs, ``pack_tokens`` and the totals are the same on every DP rank.

    Args:
        packs: rows of each micro-batch; a pack without rows is a masked filler.
        teachers: name of the teacher of each pack, in order; an empty one where there are not several.
        pack_tokens: size to which every pack is padded.
        total_rows, total_sequences, total_response_tokens: global denominators of losses, over all
            ranks: samples, conversations with a response token, and sampled response tokens.
        rows_per_unit: number of neighboring rows that stay in one pack and in order: 2 for
            preference pairs.
    """

    packs: tuple[tuple[PackRow, ...], ...]
    teachers: tuple[str, ...]
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
