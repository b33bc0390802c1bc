"""The records of a step's experience, free of torch.

Shape legend: N samples of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

import numpy as np

from megarl.types import BoolArray, FloatArray, Int64Array, Ragged


@dataclass(frozen=True, kw_only=True)
class SampleScores:
    """The scores of samples; those of a chunk are neighbors, in the order of its rows.

    Args:
        chunks: chunk of each sample, [N] int64.
        scores: scores, [N] float32; NaN without one.
        groups: prompt of each sample, numbered within the step, [N] int64.
        sequence_advantages: advantages, [N] float32; None where the algorithm
            estimates them per token.
        actor_mask: samples that the actor learns from if they have a score, [N] bool.
    """

    chunks: Int64Array
    scores: FloatArray
    groups: Int64Array
    sequence_advantages: FloatArray | None
    actor_mask: BoolArray

    def only(self, chunks: Iterable[int]) -> SampleScores:
        """Returns the samples of these chunks, in the chunks' order."""
        members = [np.flatnonzero(self.chunks == chunk) for chunk in chunks]
        rows = np.concatenate([np.zeros(0, np.int64), *members])
        advantages = self.sequence_advantages
        if advantages is not None:
            advantages = advantages[rows]
        return SampleScores(
            chunks=self.chunks[rows],
            scores=self.scores[rows],
            groups=self.groups[rows],
            sequence_advantages=advantages,
            actor_mask=self.actor_mask[rows],
        )


@dataclass(frozen=True, kw_only=True)
class TokenRewardScale:
    """The scale of a reward model of tokens: gain * raw + bias; ``differences`` scales increments."""

    gain: float
    bias: float
    differences: bool


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """A step's inputs of the experience beside the samples.

    Args:
        kl_coef: coefficient of the KL penalty, per nat.
        version: version of the actor's weights before the update; those that sampled are at most
            ``max_staleness`` older.
        value_norm: moments of the value normalizer; None without one.
        dense: scale of a reward model that scores every token; None where responses have one score.
        turn_rewards: factor of the rewards of turns; None where the score has them.
        records_kept: whether the rollouts have the ids from which tokens were sampled.
    """

    kl_coef: float
    version: int
    groups: int
    max_staleness: int = 0
    value_norm: Mapping[str, float] | None = None
    dense: TokenRewardScale | None = None
    turn_rewards: float | None = None
    records_kept: bool = False


@dataclass(frozen=True, kw_only=True)
class ExperienceReport:
    """Metrics of a step's experience, over all replicas, and the new moments of the value normalizer."""

    metrics: Mapping[str, float]
    value_norm: Mapping[str, float] | None


@dataclass(frozen=True, kw_only=True)
class ExperienceChunk:
    """The samples of one chunk for an update; every float32 column has one value per sampled token.

    Columns that the loss does not read are None.

    Args:
        old_logprobs: nats, by the actor before the update, or by the engines; None
            where the update has its own.
        proximal_weights: position of the old policy between the engines' (0) and the one in
            training (1); None where ``old_logprobs`` are the old policy's.
        returns: returns, in the units of the critic's values.
        weights: factors of the policy loss's terms.
        actor_mask: 1 where the actor learns, else 0; None where it learns from all tokens.
        scored_mask: 1 where the critic learns, on the tokens of scored responses, else 0; None
            where all are scored.
        ages: versions between the weights that sampled a token and the actor's.
        kept_counts, kept_ids, routes: see ``RolloutChunk``.
    """

    sample_ids: tuple[str, ...]
    prompt_ids: Ragged
    response_ids: Ragged
    old_logprobs: Ragged | None = None
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
    kept_counts: Ragged | None = None
    kept_ids: Ragged | None = None
    routes: Ragged | None = None


_OTHERS = ("sample_ids", "prompt_ids", "response_ids", "loss_mask", "kept_counts", "kept_ids", "routes")
TOKEN_COLUMNS = tuple(field.name for field in fields(ExperienceChunk) if field.name not in _OTHERS)
"""The columns of ``ExperienceChunk`` with a number per sampled token."""
