"""What a stage returns of a step and of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megarl.run.samples import ShownSample

Metrics = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What the driver knows of a step.

    Args:
        step: from 1.
        metrics: of the step; those of the updates are not among them.
        updates: metrics of each optimizer step.
        samples: some rollouts of the step.
    """

    step: int
    metrics: Metrics
    updates: Sequence[Metrics]
    samples: Sequence[ShownSample] = ()

    def all_metrics(self) -> dict[str, float]:
        """The step's metrics, and the means of those of its updates over the optimizer steps that have them.

        Of ``*_max`` and ``*_min`` they are the largest and the smallest.
        """
        names = dict.fromkeys(name for update in self.updates for name in update)
        found = {name: [update[name] for update in self.updates if name in update] for name in names}
        return {**self.metrics, **{name: _over_updates(name, values) for name, values in found.items()}}


def _over_updates(name: str, values: Sequence[float]) -> float:
    if name.endswith("_max"):
        return max(values)
    return min(values) if name.endswith("_min") else sum(values) / len(values)


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """What held-out data says of the weights.

    Args:
        step: after which it was made; 0 before the first.
        metrics: ``eval/*``; those of samples come with the half width of their 95% interval, ``eval/*_ci95``.
        samples: some of them.
    """

    step: int
    metrics: Metrics
    samples: Sequence[ShownSample] = ()
