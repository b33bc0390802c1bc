"""Who does what in a step, for each role: planned on the driver from ids and lengths."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.config import PPOConfig
from megarl.data.schedule import inference_schedule, update_schedules
from megarl.types import RoleName, SampleInfo, Schedule


class StepPlan:
    """The schedules of one step.

    Args:
        config: of the run.
        samples: of the step.
        step: its number.
    """

    def __init__(self, config: PPOConfig, samples: Sequence[SampleInfo], step: int) -> None:
        self._config = config
        self._samples = samples
        self.step = step

    def inference(self, role: RoleName) -> Schedule:
        """A forward pass over all samples."""
        return inference_schedule(
            self._samples, self._config.layout(role), self._config.role(role).tokens_per_micro_batch
        )

    def passes(self, role: RoleName) -> list[tuple[Schedule, ...]]:
        """The optimizer steps, epoch by epoch where the epochs may end early, else together.

        Actor and critic take the same samples in each.
        """
        algo = self._config.algo
        steps = update_schedules(
            self._samples,
            self._config.layout(role),
            self._config.role(role).tokens_per_micro_batch,
            mini_batches=algo.mini_batches,
            epochs=algo.ppo_epochs,
            seed=self._config.run.seed,
            step=self.step,
        )
        size = len(steps) if algo.early_stop is None else algo.mini_batches
        return [steps[start : start + size] for start in range(0, len(steps), size)]
