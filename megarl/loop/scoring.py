"""What responses are worth: the reward model's and the rules' scores, and what an algorithm makes of them.

Shape legend: N samples of a step, in the order of ``Rollouts.samples``. A score that is not a number is none:
its source could not score the sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from megarl.algos.registry import MISSING_ENDS, bound
from megarl.algos.reward_shaping import ScoreScale, clip_scores
from megarl.cluster.calls import Call
from megarl.cluster.engines import RolloutGroup, Rollouts
from megarl.cluster.ray_worker import ChunkRefs
from megarl.cluster.scorers import PendingScores, RuleScorers
from megarl.cluster.trainers import Role, merged
from megarl.config import RunConfig
from megarl.config.schema import Reward, RewardFunction, Scores, TruncateAt
from megarl.data.schedule import inference_schedule
from megarl.data.stream import stable_hash
from megarl.loop.reward_files import read_scale
from megarl.rewards.functions import labels
from megarl.types import Prompt, Ragged, RoleName, SampleInfo, Schedule

T = TypeVar("T", bound=np.generic)
Values = npt.NDArray[np.float32]

REWARD_MODEL = "reward_model"
"""The reward model's name among the sources of a score."""

Sources = Mapping[str, Values]
"""[N] scores by source: the reward model's normalised, those of each rule as they are."""


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """Scores in the making.

    Args:
        samples: as they are scored: of responses that are truncated for it, lengths and ends are those that a scorer
            sees.
        wait: returns the scores of the samples, in their order; raises WorkerError where a source failed.
        seconds: waits likewise; returns what the source took that took longest.
        dense: the reward model's raw scores, of each response one before its first token and one after each; None
            where it scores responses alone. Its source is the last of them then.
    """

    samples: Sequence[SampleInfo]
    wait: Callable[[], Sources]
    seconds: Callable[[], float] = float
    dense: ChunkRefs[Ragged] | None = None


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """Whoever scores responses.

    Args:
        model: the role of the reward model; None without one.
        plan: a forward pass of the reward model over samples.
        scale: of the reward model.
        rules: the processes that run functions; None without any.
        engines: that truncate responses for the scorers.
        truncate_at: where the scorers' view of a response ends; None: where it does.
        dense: whether the reward model scores every token.
    """

    model: Role | None
    plan: Callable[[Sequence[SampleInfo]], Schedule]
    scale: ScoreScale
    rules: RuleScorers | None
    engines: RolloutGroup
    truncate_at: TruncateAt | None
    dense: bool

    def submit(self, rollouts: Rollouts, prompts: Mapping[str, Prompt], functions: Sequence[RewardFunction]) -> Scoring:
        """Starts to score; returns at once, or where responses are truncated when their ends are known.

        Args:
            prompts: of the rollouts, by id.
            functions: that score as well.
        """
        if self.truncate_at is not None:
            rollouts = self.engines.truncate(rollouts, self.truncate_at.token, self.truncate_at.after)
        model = rules = None
        if self.model is not None:
            score = self.model.token_scores if self.dense else self.model.scores
            model = score(self.plan(rollouts.samples), rollouts.chunks)
        if functions:
            assert self.rules is not None
            rules = self.rules.score(functions, rollouts, prompts)
        return Scoring(
            samples=rollouts.samples,
            wait=lambda: sources_of(model, rules, rollouts.samples, scale=self.scale),
            seconds=lambda: max(call.longest() for call in (model, rules.call if rules else None) if call is not None),
            dense=model.chunks if model is not None and self.dense else None,
        )


def scorer_of(
    config: RunConfig,
    reward: Reward,
    roles: Mapping[RoleName, Role],
    rules: RuleScorers | None,
    engines: RolloutGroup,
    truncate_at: TruncateAt | None = None,
) -> Scorer:
    """The scorer of a run.

    Args:
        config: of the run, with the reward model's layout where there is one.
        reward: of the configuration.
        roles: of the run.
        rules, engines, truncate_at: see Scorer.
    """

    def plan(samples: Sequence[SampleInfo]) -> Schedule:
        return inference_schedule(samples, config.layout("reward"), config.role("reward").tokens_per_micro_batch)

    return Scorer(
        model=roles.get("reward"),
        plan=plan,
        scale=read_scale(reward.path),
        rules=rules,
        engines=engines,
        truncate_at=truncate_at,
        dense=reward.dense is not None,
    )


def sources_of(
    model: Call | None, rules: PendingScores | None, samples: Sequence[SampleInfo], *, scale: ScoreScale
) -> dict[str, Values]:
    """Waits for the scores of samples.

    Args:
        model: the reward model's call; None without one.
        rules: the rules' scores; None without any.
        samples: that are scored.
        scale: of the reward model.

    Raises:
        WorkerError: a source failed.
    """
    scores: dict[str, Values] = {}
    if model is not None:
        raw = in_order(merged(model), samples)
        scores[REWARD_MODEL] = scale.apply(torch.from_numpy(np.where(np.isfinite(raw), raw, np.nan))).numpy()
    if rules is not None:
        columns = rules.wait()
        for label in next(iter(columns.values())):
            scores[label] = in_order({chunk: own[label] for chunk, own in columns.items()}, samples)
    return scores


def weights_of(reward: Reward) -> dict[str, float]:
    """What the score of each source is multiplied with, by its name; scores of tokens have no part in a response's."""
    rules = zip(labels(reward.functions), reward.functions, strict=True)
    model = 0.0 if reward.dense else reward.weight
    return {REWARD_MODEL: model, **{label: function.weight for label, function in rules}}


def total_scores(sources: Sources, samples: Sequence[SampleInfo], reward: Reward, scores: Scores) -> Values:
    """What is learnt from, [N]: the weighted sum of the sources, clipped, and what a missing end makes of it.

    Args:
        sources: [N] each; a sample that one of them could not score has no score at all.
        samples: as they were scored.
        reward: with the weights of the sources.
        scores: what becomes of their sum.
    """
    weights = weights_of(reward)
    total = sum((weights[name] * values for name, values in sources.items()), np.zeros(len(samples)))
    shaped = torch.from_numpy(np.asarray(total, dtype=np.float32))
    scored = shaped.isfinite()
    if scores.clip is not None:
        shaped = clip_scores(shaped, *scores.clip)
    if scores.missing_end is not None and scores.missing_end.name in MISSING_ENDS:
        shape = bound(MISSING_ENDS, scores.missing_end.name, scores.missing_end.options)
        shaped = shape(shaped, torch.tensor([sample.finished for sample in samples]))
    return torch.where(scored, shaped, torch.nan).numpy()


def unscored_metrics(sources: Sources) -> dict[str, float]:
    """How many samples have no score: ``rewards/unscored``, and by source ``rewards/unscored/SOURCE``."""
    missing = {name: ~np.isfinite(values) for name, values in sources.items()}
    metrics = {f"rewards/unscored/{name}": int(of_source.sum()) for name, of_source in missing.items()}
    return {"rewards/unscored": int(np.any(list(missing.values()), axis=0).sum()), **metrics}


def known_means(named: Sources) -> dict[str, float]:
    """The mean of each that are numbers, by its name; of those alone that have any."""
    known = {name: values[np.isfinite(values)] for name, values in named.items()}
    return {name: float(values.mean()) for name, values in known.items() if len(values)}


def columns_of(values: npt.NDArray[T], samples: Sequence[SampleInfo]) -> dict[int, npt.NDArray[T]]:
    """[N] values -> one column per chunk."""
    places: dict[int, dict[int, int]] = {}
    for place, sample in enumerate(samples):
        places.setdefault(sample.chunk, {})[sample.row] = place
    return {chunk: values[[rows[row] for row in range(len(rows))]] for chunk, rows in places.items()}


def in_order(columns: Mapping[int, Values], samples: Sequence[SampleInfo]) -> Values:
    """One column per chunk -> [N] values."""
    return np.array([columns[sample.chunk][sample.row] for sample in samples], dtype=np.float32)


def permutation_seed(run_seed: int, step: int) -> int:
    """Of a shuffled control."""
    return stable_hash(run_seed, step, "shuffle") % 2**63
