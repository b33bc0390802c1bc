"""What a stage of training is to the run around it, and what it tells of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megarl.loop.setup import Trainers
from megarl.obs.samples import ShownSample

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


class Stage(Protocol):
    """A stage of training, run by ``loop.run``. Every method waits until its work is done."""

    @property
    def trainers(self) -> Trainers:
        """The groups and roles; the trained ones are in checkpoints."""
        ...

    def start(self) -> None:
        """Starts every process and loads every model."""
        ...

    def begin(self, step: int) -> Metrics:
        """Makes ready for the first step of this process, after a checkpoint was loaded if there was one.

        Args:
            step: the last one taken; 0 at a run's beginning.

        Returns:
            What is worth saying of it.
        """
        ...

    def step(self, step: int) -> StepResult:
        """Takes a step."""
        ...

    @property
    def evaluate_every(self) -> int | None:
        """Steps between evaluations; None: before the first step and after the last."""
        ...

    def evaluate(self, step: int) -> EvaluationResult | None:
        """Looks at held-out data; None where there is none."""
        ...

    def make_room(self) -> None:
        """Gives the trained roles their devices, which engines may have, before they are saved."""
        ...

    def state(self) -> dict[str, Any]:
        """What the driver must know to go on from here, as JSON."""
        ...

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from where ``state`` was taken."""
        ...

    def finish(self, export: Path) -> Metrics:
        """Writes the trained model, and returns what is worth saying of it.

        Args:
            export: Hugging Face directory to make.
        """
        ...

    def close(self) -> None:
        """Lets every process end by itself."""
        ...
