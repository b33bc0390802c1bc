"""What an algorithm is told of the samples of a step: their scores, how they compare, and what is not learnt.

Shape legend: N samples of a step, in the order of ``Rollouts.samples``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megarl.algos.group_advantages import Samples
from megarl.algos.metrics import group_metrics
from megarl.algos.registry import FILTERS, GROUP_ADVANTAGES, bound
from megarl.config.schema import Algo, Reward
from megarl.loop.sampler import Keep, Sampled
from megarl.loop.scoring import (
    Scoring,
    Sources,
    Values,
    columns_of,
    known_means,
    total_scores,
    unscored_metrics,
    weights_of,
)
from megarl.types import RoleName, SampleFacts, SampleInfo


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What the algorithm is told.

    Args:
        scores: [N] float32, not a number where there is none.
        outcomes: [N] float32, an advantage per sample; None where advantages are of tokens.
        learnt: [N] bool, False where the policy is to learn nothing of a sample.
        groups: [N] int64, the number of each sample's prompt.
        metrics: of them.
    """

    scores: Values
    outcomes: Values | None
    learnt: npt.NDArray[np.bool_]
    groups: npt.NDArray[np.int64]
    metrics: dict[str, float]

    @property
    def learners(self) -> frozenset[RoleName]:
        """The roles that can learn from a sample at least; without any, their gradients would be 0."""
        scored = np.isfinite(self.scores)
        learnt: dict[RoleName, bool] = {"actor": bool((scored & self.learnt).any()), "critic": bool(scored.any())}
        return frozenset(role for role, learns in learnt.items() if learns)

    def facts(self, samples: Sequence[SampleInfo]) -> dict[int, SampleFacts]:
        """By chunk, for whoever builds the experience."""
        scores, learnt, groups = (
            columns_of(self.scores, samples),
            columns_of(self.learnt, samples),
            columns_of(self.groups, samples),
        )
        outcomes = None if self.outcomes is None else columns_of(self.outcomes, samples)
        return {
            chunk: SampleFacts(
                scores=scores[chunk],
                groups=groups[chunk],
                outcomes=None if outcomes is None else outcomes[chunk],
                learnt=learnt[chunk],
            )
            for chunk in scores
        }


def judged(sampled: Sampled, reward: Reward, algo: Algo, *, seed: int) -> tuple[Judged, Sources]:
    """Waits for the scores of a step, and compares its samples where the algorithm does.

    Args:
        sampled: the step's rollouts.
        reward: of the run.
        algo: of the run.
        seed: of the permutation that a shuffled control applies.

    Returns:
        What the algorithm is told, and the scores by source.
    """
    sources, samples = sampled.scoring.wait(), sampled.scoring.samples
    scores = total_scores(sources, samples, reward, algo.scores)
    components = np.stack(list(sources.values()), axis=-1)
    if reward.shuffle:
        order = torch.randperm(len(scores), generator=torch.Generator().manual_seed(seed)).numpy()
        scores, components = scores[order], components[order]
    groups = group_numbers(samples)
    finished = np.array([sample.finished for sample in samples])
    masks = algo.scores.missing_end is not None and algo.scores.missing_end.name == "mask"
    means = known_means({f"scores/{name}": values for name, values in sources.items()})
    numbers = torch.from_numpy(scores)
    compared = Samples(
        scores=numbers,
        groups=torch.from_numpy(groups),
        lengths=torch.tensor([sample.response_tokens for sample in sampled.rollouts.samples]),
        finished=torch.from_numpy(finished),
        scored=numbers.isfinite(),
        components=torch.from_numpy(components),
        weights=[weights_of(reward)[name] for name in sources],
        greedy_scores=None if sampled.greedy is None else _greedy(sampled.greedy, samples, reward, algo),
    )
    outcomes = None
    if not algo.of_tokens:
        outcomes = bound(GROUP_ADVANTAGES, algo.advantage.name, algo.advantage.options)(compared).float().numpy()
    return Judged(
        scores=scores,
        outcomes=outcomes,
        learnt=finished if masks else np.ones_like(finished),
        groups=groups,
        metrics={**means, **unscored_metrics(sources), **_of_groups(scores, groups)},
    ), sources


def keeper(reward: Reward, algo: Algo) -> Keep:
    """Which samples of a round are of prompts that pass the algorithm's filter; those without a score say nothing."""
    assert algo.filter is not None
    passes = bound(FILTERS, algo.filter.name, algo.filter.options)

    def keep(sources: Sources, samples: Sequence[SampleInfo]) -> npt.NDArray[np.bool_]:
        scores, groups = total_scores(sources, samples, reward, algo.scores), group_numbers(samples)
        scored = np.isfinite(scores)
        members = [torch.from_numpy(scores[(groups == group) & scored]) for group in range(groups.max() + 1)]
        return np.array([len(own) > 0 and bool(passes(own)) for own in members])[groups]

    return keep


def group_numbers(samples: Sequence[SampleInfo]) -> npt.NDArray[np.int64]:
    """[N], the number of each sample's prompt in the order in which they come."""
    numbers = {prompt_id: index for index, prompt_id in enumerate(dict.fromkeys(s.prompt_id for s in samples))}
    return np.array([numbers[sample.prompt_id] for sample in samples], dtype=np.int64)


def _of_groups(scores: Values, groups: npt.NDArray[np.int64]) -> dict[str, float]:
    """How much the scores of a prompt's samples differ, and how many prompts have one score alone; of one sample each,
    nothing."""
    scored = np.isfinite(scores)
    _, numbers, sizes = np.unique(groups[scored], return_inverse=True, return_counts=True)
    if not scored.any() or groups.max() + 1 == len(groups):
        return {}
    metrics = group_metrics(torch.from_numpy(scores[scored]), torch.from_numpy(numbers))
    return {**metrics, "group/single": int((sizes == 1).sum())}


def _greedy(greedy: Scoring, samples: Sequence[SampleInfo], reward: Reward, algo: Algo) -> Tensor:
    """[N], the score of the likeliest response to each sample's prompt."""
    totals = total_scores(greedy.wait(), greedy.samples, reward, algo.scores)
    of_prompt = {sample.prompt_id: total for sample, total in zip(greedy.samples, totals, strict=True)}
    return torch.tensor([of_prompt[sample.prompt_id] for sample in samples])
