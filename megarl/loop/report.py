"""What a run tells of its steps: files in its directory, a table on the console, a summary at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np

from megarl.cluster.resharder import SyncReport
from megarl.config import PPOConfig
from megarl.loop.directory import RunDirectory
from megarl.obs.metrics import ConsoleSink, JsonlSink
from megarl.types import SampleInfo

_COLUMNS = {
    "objective/score": "score",
    "objective/kl": "KL",
    "rollout/response_tokens_mean": "length",
    "actor/loss": "actor loss",
    "actor/grad_norm": "actor norm",
    "critic/loss": "critic loss",
    "sync/seconds": "sync s",
    "time/step": "step s",
}


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What the driver knows of a step.

    Args:
        step: from 1; the weights have this version after it.
        samples: of the step.
        objective: ``objective/*`` metrics of the experience.
        updates: metrics of each optimizer step, ``actor/*`` and ``critic/*``.
        transfer: of the weights.
        seconds: by stage.
    """

    step: int
    samples: Sequence[SampleInfo]
    objective: Mapping[str, float]
    updates: Sequence[Mapping[str, float]]
    transfer: SyncReport
    seconds: Mapping[str, float]

    def metrics(self) -> dict[str, float]:
        """One number for everything; those of the updates are means over the optimizer steps."""
        responses = np.array([sample.response_tokens for sample in self.samples])
        tokens = sum(sample.tokens for sample in self.samples)
        return {
            "version": self.transfer.version,
            **self.objective,
            "rollout/samples": len(self.samples),
            "rollout/response_tokens_mean": float(responses.mean()),
            "rollout/response_tokens_max": int(responses.max()),
            "rollout/finished": float(np.mean([sample.finished for sample in self.samples])),
            **{name: float(np.mean([update[name] for update in self.updates])) for name in self.updates[0]},
            "sync/bytes": self.transfer.nbytes,
            "sync/seconds": self.transfer.seconds,
            **self.seconds,
            "tokens_per_second": tokens / self.seconds["time/step"],
        }


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A finished run.

    Args:
        steps: taken.
        version: of the weights at the end.
        seconds: in all.
        metrics: of the last step.
    """

    steps: int
    version: int
    seconds: float
    metrics: Mapping[str, float]


class Reporter:
    """Writes ``metrics.jsonl``, a line per step, and ``updates.jsonl``, a line per optimizer step, and a table.

    Args:
        config: of the run.
        directory: of the run.
    """

    def __init__(self, config: PPOConfig, directory: RunDirectory) -> None:
        self._directory = directory
        self._steps = JsonlSink(directory.metrics)
        self._updates = JsonlSink(directory.updates)
        self._console = ConsoleSink(_COLUMNS, steps=config.run.steps)
        self._last: tuple[int, Mapping[str, float]] = (0, {})
        self._updates_taken = 0

    def started(self, seconds: float) -> None:
        """Says that everything runs."""
        print(f"started in {seconds:.0f} s; the processes print into {self._directory.logs}", flush=True)

    def write(self, result: StepResult) -> None:
        """Writes a step."""
        metrics = result.metrics()
        for update in result.updates:
            self._updates_taken += 1
            self._updates.write(result.step, {"update": self._updates_taken, **update})
        self._steps.write(result.step, metrics)
        self._console.write(result.step, metrics)
        self._last = result.step, metrics

    def summary(self, seconds: float) -> Summary:
        """Prints the end of the run and returns it."""
        step, metrics = self._last
        print(f"{step} steps in {seconds:.0f} s; metrics are in {self._directory.metrics}", flush=True)
        return Summary(steps=step, version=int(metrics["version"]), seconds=seconds, metrics=metrics)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._steps.close()
        self._updates.close()
