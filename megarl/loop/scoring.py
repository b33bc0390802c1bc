"""Scores of a step's samples: gathered from all rewards, totalled, and compared within prompts.

Shape legend: n samples of a chunk; N samples of a step, in the order of `Rollouts.samples`, which
is that of their chunks and rows; C conversations of a step, which are its samples where none has
branches; B samples of a rank or a micro-batch; R tokens of the longest response. A score takes five
forms from the reward to the loss:

1. [n] float32 by chunk and reward: from `rewards.scorer` in a scoring process, or from the reward
   model's ranks.
2. [C] on the driver: `gather_rows` concatenates the chunks, `total_scores` adds, clips and shapes
   the scores of all rewards, and `score_batch` compares the conversations of a prompt. The
   resulting `SampleScores` are [N], each sample with the numbers of its conversation; each of the
   actor's ranks gets its rows of them.
3. [B, R] on the actor's ranks: `experience.build` computes token rewards and advantages.
4. Flat, one value per response token: the columns of an `ExperienceChunk`.
5. [B, R] in the loss of a micro-batch.

A score of NaN means that the reward could not score the sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from megarl.algos.group_advantages import Samples
from megarl.algos.metrics import group_metrics
from megarl.algos.registry import FILTERS, GROUP_ADVANTAGES, MISSING_ENDS, SELECTIONS, bound
from megarl.algos.reward_shaping import clip_scores
from megarl.cluster.calls import Call, gather_by_chunk
from megarl.cluster.ray_worker import ChunkRefs
from megarl.config import SamplingConfig
from megarl.config.schema import Algo, EnvironmentSettings, Reward, RewardFunction, Scores, Selection, TruncateAt
from megarl.data.branches import Branches, Indices, numbered
from megarl.data.schedule import inference_schedule
from megarl.data.stream import stable_hash
from megarl.experience.records import SampleScores, TokenRewardScale
from megarl.groups.engines import RolloutGroup
from megarl.groups.judges import Judge
from megarl.groups.rollouts import Rollouts
from megarl.groups.scorers import RuleScorers, ScoredRows
from megarl.groups.trainers import RemoteRole
from megarl.megatron.worker import MegatronWorker
from megarl.megatron.worker_requests import ForwardRequest
from megarl.rewards.functions import labels
from megarl.rewards.judge import JUDGE_MODEL
from megarl.rewards.model_files import read_scale
from megarl.types import BoolArray, FloatArray, Prompt, Ragged, RoleName, SampleInfo

Values = FloatArray
Flags = BoolArray

REWARD_MODEL = "reward_model"
ENVIRONMENT = "environment"
"""Names of these rewards; reward functions have their labels."""

ScoresByReward = Mapping[str, Values]
"""[C] unweighted scores by the name of the reward; those of the reward model are normalized."""

SampleFilter = Callable[[ScoresByReward, Sequence[SampleInfo]], tuple[Flags, Values]]
"""Returns for each conversation whether its prompt is kept, [C] bool, and its total score, [C]."""


@dataclass(frozen=True, kw_only=True)
class ScoredSamples:
    """The scores of some samples.

    Args:
        samples: [N], with the lengths and ends of the responses as truncated for the rewards.
        seconds: duration of the slowest reward.
        dense: raw scores of the reward model before the first token of each response and after
            every token; None if it scores whole responses. The last is the score of the sample.
    """

    samples: Sequence[SampleInfo]
    scores: ScoresByReward
    seconds: float = 0.0
    dense: ChunkRefs[Ragged] | None = None

    @classmethod
    def joined(cls, parts: Sequence[ScoredSamples]) -> ScoredSamples:
        """Returns the scores of the parts of some samples; `seconds` adds up."""
        samples: list[SampleInfo] = []
        seconds = 0.0
        dense: list[ChunkRefs[Ragged]] = []
        for part in parts:
            samples += part.samples
            seconds += part.seconds
            if part.dense is not None:
                dense.append(part.dense)
        scores = {name: np.concatenate([part.scores[name] for part in parts]) for name in parts[0].scores}
        refs = ChunkRefs[Ragged].of(dense) if dense else None
        return cls(samples=samples, scores=scores, seconds=seconds, dense=refs)


class Scorer:
    """The rewards of a run: the reward model and the scoring processes.

    Args:
        engines: truncate responses.
        truncate_at: where the rewards' view of a response ends; None for whole responses.
    """

    def __init__(
        self,
        config: SamplingConfig,
        roles: Mapping[RoleName, RemoteRole],
        rules: RuleScorers | None,
        engines: RolloutGroup,
        truncate_at: TruncateAt | None = None,
        judge: Judge | None = None,
    ) -> None:
        self.model = roles.get("reward")
        self._config = config
        self._reward = config.reward
        self.rules = rules
        self._engines = engines
        self._truncate_at = truncate_at
        self._judge = judge
        self._scale = read_scale(config.reward.path)

    @property
    def token_scale(self) -> TokenRewardScale | None:
        """Returns the scale of a reward model of tokens; None if it scores whole responses."""
        reward = self._reward
        if reward.dense is None:
            return None
        gain = reward.weight * self._scale.gain
        bias = reward.weight * self._scale.bias
        return TokenRewardScale(gain=gain, bias=bias, differences=reward.dense == "differences")

    async def score(
        self, rollouts: Rollouts, prompts: Mapping[str, Prompt], functions: Sequence[RewardFunction]
    ) -> ScoredSamples:
        """Scores truncated rollouts; `prompts` are by prompt id."""
        if self._truncate_at is not None:
            rollouts = await self._engines.truncate(rollouts, self._truncate_at.token, self._truncate_at.after)
        branches = Branches.of(rollouts.samples)
        model: Call[dict[int, Values] | None] | None = None
        dense: ChunkRefs[Ragged] | None = None
        if self.model is not None:
            budget = self._config.role("reward").tokens_per_micro_batch
            schedule = inference_schedule(rollouts.samples, self.model.layout, budget)
            request = ForwardRequest(schedule=schedule, chunks=rollouts.chunks)
            if self._reward.dense:
                model = by_chunk = self.model.dispatch_by_chunk(MegatronWorker.token_scores, request)
                dense = by_chunk.chunks
            else:
                model = self.model.dispatch(MegatronWorker.scores, request)
        whole = replace(rollouts, samples=tuple(branches.whole(rollouts.samples)))
        rules: list[Call[ScoredRows]] = []
        seconds: list[float] = [0.0]
        if self.rules is not None and functions:
            rules.append(self.rules.score(functions, whole, prompts))
        if self.rules is not None and self._judge is not None:
            judged, judge_s = await self._judge.score(whole, prompts)
            rules.append(judged)
            seconds.append(judge_s)
        scores: dict[str, Values] = {}
        if model is not None:
            raw = gather_rows(await gather_by_chunk(model))[branches.last]
            known = torch.as_tensor(np.where(np.isfinite(raw), raw, np.nan))
            scores[REWARD_MODEL] = self._scale.apply(known).numpy()
            seconds.append(await model.longest())
        for call in rules:
            assert self.rules is not None
            columns = await self.rules.gather(call)
            for name in next(iter(columns.values())):
                scores[name] = gather_rows({chunk: by_reward[name] for chunk, by_reward in columns.items()})
            seconds.append(await call.longest())
        if self._config.environment is not None:
            rewards = [sample.reward for sample in whole.samples]
            scores[ENVIRONMENT] = np.array(rewards, dtype=np.float32)
        return ScoredSamples(samples=rollouts.samples, scores=scores, seconds=max(seconds), dense=dense)


def gather_rows(columns: Mapping[int, Values]) -> Values:
    """Concatenates the columns of all chunks, in the order of the chunks."""
    return np.concatenate([columns[chunk] for chunk in sorted(columns)], dtype=np.float32)


def total_scores(
    scores: ScoresByReward, samples: Sequence[SampleInfo], weights: Mapping[str, float], shaping: Scores
) -> Values:
    """Returns the weighted sum of all rewards, clipped and shaped, [C]; NaN where one is missing.

    Args:
        samples: [C].
    """
    total = np.zeros(len(samples))
    for name, values in scores.items():
        total = total + weights[name] * values
    shaped = torch.as_tensor(total.astype(np.float32))
    scored = shaped.isfinite()
    if shaping.clip is not None:
        shaped = clip_scores(shaped, *shaping.clip)
    missing_end = shaping.missing_end
    if missing_end is not None and missing_end.name in MISSING_ENDS:
        shape = bound(MISSING_ENDS, missing_end.name, missing_end.options)
        shaped = shape(shaped, torch.tensor([sample.finished for sample in samples]))
    return torch.where(scored, shaped, torch.nan).numpy()


def reward_weights(reward: Reward, environment: EnvironmentSettings | None = None) -> dict[str, float]:
    """Returns the weight of each reward by name; 0 for a reward model that scores tokens."""
    weights = {REWARD_MODEL: reward.weight}
    if reward.dense:
        weights[REWARD_MODEL] = 0.0
    if environment is not None:
        weights[ENVIRONMENT] = environment.weight
    if reward.judge_model is not None:
        weights[JUDGE_MODEL] = reward.judge_model.weight
    for name, function in zip(labels(reward.functions), reward.functions, strict=True):
        weights[name] = function.weight
    return weights


def unscored_metrics(scores: ScoresByReward) -> dict[str, int]:
    """Returns the numbers of samples without a score, of any reward and by reward."""
    missing = ~np.isfinite(np.stack(list(scores.values())))
    metrics = {"rewards/unscored": int(missing.any(axis=0).sum())}
    for name, is_missing in zip(scores, missing, strict=True):
        metrics[f"rewards/unscored/{name}"] = int(is_missing.sum())
    return metrics


def known_mean(name: str, values: Values) -> dict[str, float]:
    """Returns the mean of the finite values by name; nothing if there are none."""
    known = values[np.isfinite(values)]
    return {name: float(known.mean())} if len(known) else {}


def shuffled_order(count: int, run_seed: int, step: int) -> Indices:
    """Returns the permutation of a step's scores for `reward.shuffle`, a control experiment."""
    seed = stable_hash(run_seed, step, "shuffle") % 2**63
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).numpy()


@dataclass(frozen=True, kw_only=True)
class ScoredBatch:
    """The scores of a step, with metrics of the scores.

    Args:
        totals: [C], with the rewards of all turns.
        selected: indices of the samples to train on, in the order of `algo.select`.
    """

    samples: SampleScores
    totals: Values
    selected: Sequence[int]
    scores_by_reward: ScoresByReward
    metrics: Mapping[str, float]

    @property
    def trained_roles(self) -> frozenset[RoleName]:
        """Returns the roles with a scored, selected and unmasked sample; others have no gradient."""
        trained: set[RoleName] = set()
        scored = np.isfinite(self.samples.scores) & np.isin(np.arange(len(self.samples.scores)), self.selected)
        if scored.any():
            trained.add("critic")
        if (scored & self.samples.actor_mask).any():
            trained.add("actor")
        return frozenset(trained)


def score_batch(
    samples: Sequence[SampleInfo],
    scored: ScoredSamples,
    greedy: ScoredSamples | None,
    weights: Mapping[str, float],
    algo: Algo,
    *,
    order: Indices | None,
) -> ScoredBatch:
    """Returns the scores of a step, with the advantages of algorithms that compare samples.

    Branches count as one sample, with the score and the end of the last one and the length of all.

    Args:
        greedy: scores of the greedy responses, for algorithms that use them as a baseline.
        weights: by reward.
        order: permutation of the scores of conversations.
    """
    branches = Branches.of(samples)
    whole = branches.whole(scored.samples)
    by_reward = scored.scores
    scores = totals = total_scores(by_reward, whole, weights, algo.scores)
    if algo.from_token_rewards and ENVIRONMENT in weights:  # its rewards are placed at the ends of turns
        scores = total_scores(by_reward, whole, {**weights, ENVIRONMENT: 0.0}, algo.scores)
    components = np.zeros((len(scores), 0), dtype=np.float32)
    if by_reward:
        components = np.stack(list(by_reward.values()), axis=-1)
    if order is not None:
        scores = scores[order]
        totals = totals[order]
        components = components[order]
    groups = group_numbers(samples)
    chunks = np.array([sample.chunk for sample in samples])
    assert (np.diff(chunks) >= 0).all(), "samples are in the order of their chunks"
    finished = np.array([sample.finished for sample in whole])
    actor_mask = np.ones_like(finished)
    if algo.scores.missing_end is not None and algo.scores.missing_end.name == "mask":
        actor_mask = finished
    sequence_advantages = None
    if not algo.from_token_rewards:
        tensor = torch.as_tensor(scores)
        lengths = [sample.response_tokens for sample in branches.whole(samples)]
        compared = Samples(
            scores=tensor,
            groups=torch.as_tensor(groups[branches.last]),
            lengths=torch.tensor(lengths),
            finished=torch.as_tensor(finished),
            scored=tensor.isfinite(),
            components=torch.as_tensor(components),
            weights=[weights[name] for name in by_reward],
        )
        if greedy is not None:
            compared = replace(compared, greedy_scores=_greedy_scores(greedy, whole, weights, algo.scores))
        advantages = bound(GROUP_ADVANTAGES, algo.advantage.name, algo.advantage.options)(compared).float().numpy()
        sequence_advantages = advantages[branches.conversation]
    return ScoredBatch(
        samples=SampleScores(
            chunks=chunks,
            scores=scores[branches.conversation],
            groups=groups,
            sequence_advantages=sequence_advantages,
            actor_mask=actor_mask[branches.conversation],
        ),
        totals=totals,
        selected=range(len(samples)),
        scores_by_reward=by_reward,
        metrics=_score_metrics(by_reward, totals, groups[branches.last]),
    )


def with_selection(
    batch: ScoredBatch, samples: Sequence[SampleInfo], selection: Selection, samples_per_prompt: int
) -> ScoredBatch:
    """Returns a batch with the samples that are trained on, of which each has a score.

    Args:
        samples: [N], with the ends of the responses as truncated for the rewards.
        samples_per_prompt: neighbors that answer the same draw of a prompt.
    """
    branches = Branches.of(samples)
    scores = batch.totals
    discarded = ~np.isfinite(scores)
    if selection.discard_unfinished:
        discarded |= ~np.array([sample.finished for sample in branches.whole(samples)])
    if selection.min_score is not None:
        discarded |= ~(scores >= selection.min_score)
    draws = torch.arange(len(scores)) // samples_per_prompt
    select = bound(SELECTIONS, selection.by.name, selection.by.options)
    conversations = select(torch.as_tensor(scores), draws, torch.as_tensor(discarded)).numpy()
    metrics = {"select/samples": len(conversations), **known_mean("select/score", scores[conversations])}
    selected: list[int] = []
    for conversation in conversations.tolist():
        selected += branches.rows(conversation)
    return replace(batch, selected=selected, metrics={**batch.metrics, **metrics})


def without_scores(batch: ScoredBatch) -> ScoredBatch:
    """Returns a batch in which nothing scores: it is trained on, and has no totals and no metrics of them."""
    unscored = {name: value for name, value in batch.metrics.items() if name.startswith("rewards/unscored")}
    totals = np.full_like(batch.totals, np.nan)
    return replace(batch, totals=totals, scores_by_reward={}, metrics=unscored)


def sample_filter(weights: Mapping[str, float], algo: Algo) -> SampleFilter:
    """Returns the algorithm's filter of conversations; it drops prompts without a scored one."""
    assert algo.filter is not None
    passes = bound(FILTERS, algo.filter.name, algo.filter.options)

    def keep(scores: ScoresByReward, samples: Sequence[SampleInfo]) -> tuple[Flags, Values]:
        totals = total_scores(scores, samples, weights, algo.scores)
        groups = group_numbers(samples)
        scored = np.isfinite(totals)
        kept: list[bool] = []
        for group in range(groups.max() + 1):
            members = totals[scored & (groups == group)]
            kept.append(len(members) > 0 and bool(passes(torch.as_tensor(members))))
        return np.array(kept)[groups], totals

    return keep


def scores_by_prompt(samples: Sequence[SampleInfo], totals: Values) -> dict[str, list[float]]:
    """Returns the known scores of conversations, [C], by their prompts."""
    scores: dict[str, list[float]] = {}
    for sample, total in zip(samples, totals.tolist(), strict=True):
        known = scores.setdefault(sample.prompt_id, [])
        if math.isfinite(total):
            known.append(total)
    return scores


def group_numbers(samples: Sequence[SampleInfo]) -> Indices:
    """Returns the index of each sample's prompt, [N], in the order of first appearance."""
    return numbered(sample.prompt_id for sample in samples)


def _score_metrics(by_reward: ScoresByReward, totals: Values, groups: Indices) -> dict[str, float]:
    """Returns the metrics of a step's scores; none where nothing scores."""
    metrics: dict[str, float] = {}
    if not by_reward:
        return metrics
    for name, values in by_reward.items():
        metrics |= known_mean(f"scores/{name}", values)
    return {**metrics, **unscored_metrics(by_reward), **_group_metrics(totals, groups)}


def _group_metrics(scores: Values, groups: Indices) -> dict[str, float]:
    """Returns the metrics `group/*`; none if every prompt has one sample, or nothing a score."""
    scored = np.isfinite(scores)
    _, numbers, sizes = np.unique(groups[scored], return_inverse=True, return_counts=True)
    if not scored.any() or groups.max() + 1 == len(groups):
        return {}
    metrics = group_metrics(torch.as_tensor(scores[scored]), torch.as_tensor(numbers))
    return {**metrics, "group/single": int((sizes == 1).sum())}


def _greedy_scores(
    greedy: ScoredSamples, samples: Sequence[SampleInfo], weights: Mapping[str, float], shaping: Scores
) -> torch.Tensor:
    """Returns the score of the greedy response to the prompt of each of some samples."""
    greedy_samples = Branches.of(greedy.samples).whole(greedy.samples)
    totals = total_scores(greedy.scores, greedy_samples, weights, shaping)
    by_prompt = {sample.prompt_id: total for sample, total in zip(greedy_samples, totals, strict=True)}
    return torch.tensor([by_prompt[sample.prompt_id] for sample in samples])
