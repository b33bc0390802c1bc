"""What responses are worth: the reward model's and the rules' scores, and what an algorithm makes of them.

Shape legend: N samples of a step, in the order of ``Rollouts.samples``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from megarl.algos.advantages import grpo
from megarl.algos.metrics import group_metrics
from megarl.algos.rewards import normalise_scores, score_scale, shape_scores
from megarl.cluster.calls import Call
from megarl.cluster.group import Role, merged
from megarl.cluster.rollouts import Rollouts
from megarl.cluster.scoring import PendingScores, RuleScorers
from megarl.config.schema import Algo, Reward, RewardFunction
from megarl.data.hashing import stable_hash
from megarl.rewards import labels
from megarl.types import Prompt, SampleInfo, Schedule

Values = npt.NDArray[np.float32]

REWARD_MODEL = "reward_model"
"""The reward model's name among the sources of a score."""

_NORMALISATION_FILE = "reward_normalisation.json"


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A reward model's raw scores become ``(score - mean) / std``."""

    mean: float = 0.0
    std: float = 1.0

    @classmethod
    def read(cls, directory: str | None) -> Scale:
        """That of a reward model's directory; no change where it has none."""
        file = None if directory is None else Path(directory) / _NORMALISATION_FILE
        return cls(**json.loads(file.read_text())) if file is not None and file.exists() else cls()

    @classmethod
    def of(cls, raw: Values) -> Scale:
        """That which gives reference samples mean 0 and variance 1.

        Args:
            raw: [N] scores of the samples.

        Raises:
            ValueError: all scores are equal.
        """
        mean, std = score_scale(torch.from_numpy(raw))
        return cls(mean=mean, std=std)

    def write(self, directory: Path) -> None:
        """Puts it beside a reward model."""
        (directory / _NORMALISATION_FILE).write_text(json.dumps(asdict(self)) + "\n")

    def apply(self, raw: Values) -> Values:
        """[N] raw scores -> [N]."""
        return normalise_scores(torch.from_numpy(raw), mean=self.mean, deviation=self.std).numpy()


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """Scores in the making.

    Args:
        samples: that are scored.
        model: the reward model's call; None without one.
        rules: the rules' scores; None without any.
        scale: of the reward model.
    """

    samples: Sequence[SampleInfo]
    model: Call | None
    rules: PendingScores | None
    scale: Scale

    def wait(self) -> dict[str, Values]:
        """[N] scores by source: the reward model's normalised, those of each rule as they are.

        Raises:
            WorkerError: a source failed.
        """
        scores: dict[str, Values] = {}
        if self.model is not None:
            scores[REWARD_MODEL] = self.scale.apply(in_order(merged(self.model), self.samples))
        if self.rules is not None:
            columns = self.rules.wait()
            for label in next(iter(columns.values())):
                scores[label] = in_order({chunk: own[label] for chunk, own in columns.items()}, self.samples)
        return scores


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """Whoever scores responses.

    Args:
        model: the role of the reward model; None without one.
        scale: of the reward model.
        rules: the processes that run functions; None without any.
    """

    model: Role | None
    scale: Scale
    rules: RuleScorers | None

    def submit(
        self,
        rollouts: Rollouts,
        prompts: Mapping[str, Prompt],
        schedule: Schedule | None,
        functions: Sequence[RewardFunction],
    ) -> Scoring:
        """Starts to score, and returns at once.

        Args:
            prompts: of the rollouts, by id.
            schedule: of the reward model; None without one.
            functions: that score as well.
        """
        model = rules = None
        if self.model is not None:
            assert schedule is not None
            model = self.model.scores(schedule, rollouts.chunks)
        if functions:
            assert self.rules is not None
            rules = self.rules.score(functions, rollouts, prompts)
        return Scoring(samples=rollouts.samples, model=model, rules=rules, scale=self.scale)


def total_scores(
    sources: Mapping[str, Values], samples: Sequence[SampleInfo], reward: Reward, algo: Algo, *, seed: int
) -> Values:
    """What the algorithm learns from, [N]: the weighted sum of the sources, clipped, with the score of missing ends.

    Args:
        sources: [N] each.
        seed: of the permutation that a shuffled control applies.
    """
    rules = zip(labels(reward.functions), reward.functions, strict=True)
    weights = {REWARD_MODEL: reward.weight, **{label: function.weight for label, function in rules}}
    total = sum((weights[name] * scores for name, scores in sources.items()), np.zeros(len(samples)))
    finished = torch.tensor([sample.finished for sample in samples])
    scores = torch.from_numpy(np.asarray(total, dtype=np.float32))
    shaped = shape_scores(scores, finished, clip=algo.score_clip, missing_end=algo.missing_end_score)
    if reward.shuffle:
        shaped = shaped[torch.randperm(len(shaped), generator=torch.Generator().manual_seed(seed))]
    return shaped.numpy()


def group_outcomes(scores: Values, samples: Sequence[SampleInfo]) -> tuple[Values, dict[str, float]]:
    """The advantage of each sample among the samples of its prompt, [N], and how much these differ."""
    numbers = {prompt_id: index for index, prompt_id in enumerate(dict.fromkeys(s.prompt_id for s in samples))}
    groups = torch.tensor([numbers[sample.prompt_id] for sample in samples])
    values = torch.from_numpy(scores)
    return grpo(values, groups).numpy(), group_metrics(values, groups)


def columns_of(values: Values, samples: Sequence[SampleInfo]) -> dict[int, Values]:
    """[N] values -> one column per chunk."""
    columns: dict[int, dict[int, float]] = {}
    for sample, value in zip(samples, values, strict=True):
        columns.setdefault(sample.chunk, {})[sample.row] = float(value)
    return {
        chunk: np.array([rows[row] for row in range(len(rows))], dtype=np.float32) for chunk, rows in columns.items()
    }


def in_order(columns: Mapping[int, Values], samples: Sequence[SampleInfo]) -> Values:
    """One column per chunk -> [N] values."""
    return np.array([columns[sample.chunk][sample.row] for sample in samples], dtype=np.float32)


def permutation_seed(run_seed: int, step: int) -> int:
    """Of a shuffled control."""
    return stable_hash(run_seed, step, "shuffle") % 2**63
