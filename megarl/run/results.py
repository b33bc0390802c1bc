"""Results of a step and of an evaluation, and the samples in them that people may read: samples.jsonl."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from megarl.cluster.engines import Rollouts
from megarl.data.tokenizer import Tokenizer
from megarl.run.sinks import JsonLines, Metrics


@dataclass(frozen=True, kw_only=True)
class ShownSample:
    """A prompt, a response to it, and its scores.

    Args:
        prompt, response: text, or token ids when the run has no tokenizer.
        finished: False when the response was cut off at the length limit.
        score: the training score; in an evaluation the reward model's, or else that of the first function.
        scores: unweighted, by source: the reward model and each function.
    """

    sample_id: str
    prompt_id: str
    prompt: str | tuple[int, ...]
    response: str | tuple[int, ...]
    finished: bool
    score: float
    scores: Mapping[str, float]


class SampleWriter:
    """Appends samples to a file, a JSON object each."""

    def __init__(self, path: str | Path) -> None:
        self._lines = JsonLines(path)

    def write(self, step: int, kind: Literal["train", "evaluation"], samples: Iterable[ShownSample]) -> None:
        """Appends the samples of a step, or of the evaluation after it."""
        for sample in samples:
            self._lines.write({"step": step, "kind": kind, **asdict(sample)})

    def close(self) -> None:
        self._lines.close()


def shown_samples(
    rollouts: Rollouts,
    scores: npt.NDArray[np.float32],
    sources: Mapping[str, npt.NDArray[np.float32]],
    tokenizer: Tokenizer | None,
    count: int,
) -> list[ShownSample]:
    """Returns the first `count` samples at most; fetches only their chunks.

    Args:
        scores: [N] of the samples.
        sources: [N] by source.
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
                scores={name: float(values[index]) for name, values in sources.items()},
            )
        )
    return shown


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What the driver knows of a step.

    Args:
        step: from 1.
        metrics: without those of the optimizer steps.
        updates: metrics of each optimizer step.
        samples: some of its rollouts.
    """

    step: int
    metrics: Metrics
    updates: Sequence[Metrics]
    samples: Sequence[ShownSample] = ()

    def all_metrics(self) -> dict[str, float]:
        """Returns the metrics of the step, with the mean of each metric over the optimizer steps that have it.

        Of `*_max` and `*_min` it is the largest and the smallest.
        """
        names = dict.fromkeys(name for update in self.updates for name in update)
        values = {name: [update[name] for update in self.updates if name in update] for name in names}
        return {**self.metrics, **{name: _over_updates(name, found) for name, found in values.items()}}


def _over_updates(name: str, values: Sequence[float]) -> float:
    if name.endswith("_max"):
        return max(values)
    return min(values) if name.endswith("_min") else sum(values) / len(values)


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """Metrics of an evaluation.

    Args:
        step: after which it was made; 0 before the first.
        metrics: `eval/*`, those of samples with the half width of their 95% interval, `eval/*_ci95`.
        samples: some of them.
    """

    step: int
    metrics: Metrics
    samples: Sequence[ShownSample] = ()
