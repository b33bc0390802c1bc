"""Optimizer steps that all ranks skipped: the loss or the gradient was not finite."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.config import RolloutTrainingConfig, TrainingConfig
from megarl.config.schema import Rollout
from megarl.errors import RunError
from megarl.files import read_lines
from megarl.loop.sampler import Sampled
from megarl.rollout.replay import write_sample
from megarl.run.health import skipped_roles
from megarl.run.paths import RunPaths
from megarl.run.results import StepResult
from megarl.run.sinks import Metrics
from megarl.types import SampleInfo


class SkippedSteps:
    """Counts each role's last skipped optimizer steps, up to `run.max_skipped_steps`."""

    def __init__(self, config: TrainingConfig, paths: RunPaths) -> None:
        self._limit = config.run.max_skipped_steps
        if self._limit is not None:
            self._limit = min(self._limit, config.steps * config.updates_per_step)
        self._batches = f"the rows of these steps are in {paths.skipped}"
        if isinstance(config, RolloutTrainingConfig):
            self._batches = f"rollout.replay={config.rollout.replay or paths.skipped} repeats these steps"
        self._in_a_row = Counter[str]()
        for update in read_lines(paths.updates, last=self._limit or 1):
            self._count(update)

    def add(self, result: StepResult) -> None:
        """Takes the result of a step; raises RunError at the limit."""
        for update in result.updates:
            for role in self._count(update):
                if self._limit is not None and self._in_a_row[role] >= self._limit:
                    steps = f"{self._in_a_row[role]} optimizer steps in a row (run.max_skipped_steps)"
                    raise RunError(
                        f"{role}: the loss or the gradient was not finite in {steps}; the weights are those before. "
                        f"Lower the learning rate, or look for the cause: {self._batches}"
                    )

    def _count(self, update: Mapping[str, Any]) -> list[str]:
        """Counts an optimizer step; returns the roles that skipped it."""
        skipped = skipped_roles(update)
        for name in update:
            role = name.partition("/")[0]
            if role not in skipped:
                del self._in_a_row[role]
        self._in_a_row.update(skipped)
        return skipped


class SkippedBatches:
    """Writes the batches of the last consecutive steps with skipped optimizer steps."""

    def __init__(self, config: TrainingConfig) -> None:
        paths = RunPaths(config.run.dir)
        self._directory = paths.skipped
        self._last: int | None = None
        for update in read_lines(paths.updates, last=config.updates_per_step):  # the run may have resumed
            if skipped_roles(update):
                self._last = update["step"]

    def add(self, step: int, updates: Sequence[Metrics], write: Callable[[Path], None]) -> None:
        """Calls `write` with the directory if optimizer steps were skipped; survives a full disk."""
        if not any(skipped_roles(update) for update in updates):
            return
        try:
            if self._last != step - 1:
                shutil.rmtree(self._directory, ignore_errors=True)
            self._directory.mkdir(exist_ok=True)
            self._last = step
            write(self._directory)
        except OSError as error:
            print(f"the batch of step {step} is not in {self._directory}: {error}", file=sys.stderr, flush=True)


def write_rollouts(sampled: Sampled, rollout: Rollout, kept_max: int | None, directory: Path) -> None:
    """Writes the rollouts of a step for `rollout.replay`."""
    for rollouts in (sampled.rollouts, sampled.greedy_rollouts):
        if rollouts is None:
            continue
        chunks = rollouts.fetched()
        for sample in rollouts.samples:
            write_sample(directory, chunks[sample.chunk], sample.row, rollout, kept_max)


def write_rows(step: int, samples: Sequence[SampleInfo], directory: Path) -> None:
    """Writes the numbers of a step's rows in their order."""
    rows = list(dict.fromkeys(sample.prompt_id for sample in samples))
    line = json.dumps({"step": step, "rows": rows}) + "\n"
    (directory / f"step-{step}.json").write_text(line, encoding="utf-8")
