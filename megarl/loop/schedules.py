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

    def update(self, role: RoleName) -> tuple[Schedule, ...]:
        """The optimizer steps; actor and critic take the same samples in each."""
        return update_schedules(
            self._samples,
            self._config.layout(role),
            self._config.role(role).tokens_per_micro_batch,
            mini_batches=self._config.algo.mini_batches,
            epochs=self._config.algo.ppo_epochs,
            seed=self._config.run.seed,
            step=self.step,
        )
