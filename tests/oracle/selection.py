"""Selection of samples: rejection fine-tuning, and group filters."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from tests.oracle.models import Sample


def best_of_each(samples: Sequence[Sample]) -> list[Sample]:
    """The best sample of each prompt, the first of equals; those without a score are out."""
    kept: dict[int, Sample] = {}
    for sample in samples:
        if sample.score is None:
            continue
        best = kept.get(sample.group)
        if best is None or best.score is None or sample.score > best.score:
            kept[sample.group] = sample
    return list(kept.values())


def best_of_all(samples: Sequence[Sample], fraction: float) -> list[Sample]:
    """The best fraction of all samples, best first, the later of equals first."""
    scored = [(sample.score, i) for i, sample in enumerate(samples) if sample.score is not None]
    return [samples[i] for _, i in sorted(scored, reverse=True)[: int(len(samples) * fraction)]]


def deviating(scores: Sequence[float], tolerance: float = 0.0) -> bool:
    """Whether the scores of a group differ."""
    return statistics.pstdev(scores) > tolerance


def between(scores: Sequence[float], low: float = 0.0, high: float = 1.0) -> bool:
    """Whether their mean lies strictly between two bounds."""
    return low < statistics.fmean(scores) < high
