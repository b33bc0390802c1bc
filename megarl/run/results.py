"""Results of a step and of an evaluation, and the samples in them for people to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megarl.cluster.engines import Rollouts
from megarl.data.tokenizer import Tokenizer
from megarl.run.sinks import Metrics


@dataclass(frozen=True, kw_only=True)
class ShownSample:
    """A prompt, a response to it, and its scores.

    Args:
        prompt, response: text, or token ids if the run has no tokenizer.
        finished: False if the response was cut off at the length limit.
        score: the training score; in an evaluation the reward model's, or else that of the first function.
        scores: unweighted, by reward.
    """

    sample_id: str
    prompt_id: str
    prompt: str | tuple[int, ...]
    response: str | tuple[int, ...]
    finished: bool
    score: float
    scores: Mapping[str, float]


def shown_samples(
    rollouts: Rollouts,
    scores: npt.NDArray[np.float32],
    by_reward: Mapping[str, npt.NDArray[np.float32]],
    tokenizer: Tokenizer | None,
    count: int,
) -> list[ShownSample]:
    """Returns the first `count` samples at most, fetching only their chunks.

    Args:
        scores: [N].
        by_reward: [N] each.
    """

    def text(ids: npt.NDArray[np.int32]) -> str | tuple[int, ...]:
        return tuple(ids.tolist()) if tokenizer is None else tokenizer.decode(ids.tolist())

    shown: list[ShownSample] = []
    for index, sample in enumerate(rollouts.samples[:count]):
        chunk = rollouts.chunks[sample.chunk]
        shown.append(
            ShownSample(
                sample_id=sample.sample_id,
                prompt_id=sample.prompt_id,
                prompt=text(chunk.prompt_ids[sample.row]),
                response=text(chunk.response_ids[sample.row]),
                finished=sample.finished,
                score=float(scores[index]),
                scores={name: float(values[index]) for name, values in by_reward.items()},
            )
        )
    return shown


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The metrics of a step and some of its samples.

    Args:
        step: from 1.
        metrics: without those of the optimizer steps.
        updates: metrics of each optimizer step.
    """

    step: int
    metrics: Metrics
    updates: Sequence[Metrics]
    samples: Sequence[ShownSample] = ()

    def all_metrics(self) -> dict[str, float]:
        """Returns all metrics; of those of optimizer steps the mean, of `*_max` and `*_min` the extreme."""
        names = dict.fromkeys(name for update in self.updates for name in update)
        values = {name: [update[name] for update in self.updates if name in update] for name in names}
        return {**self.metrics, **{name: _over_updates(name, found) for name, found in values.items()}}


def _over_updates(name: str, values: Sequence[float]) -> float:
    if name.endswith("_max"):
        return max(values)
    return min(values) if name.endswith("_min") else sum(values) / len(values)


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """The metrics of an evaluation and some of its samples.

    Args:
        step: after which it was made; 0 before the first.
        metrics: `eval/*`, those of samples with the half width of their 95% interval, `eval/*_ci95`.
    """

    step: int
    metrics: Metrics
    samples: Sequence[ShownSample] = ()
