"""Ends a run whose responses get no scores."""

from __future__ import annotations

from megarl.config import PPOConfig, RAFTConfig, TrainingConfig
from megarl.errors import RunError
from megarl.run.display import counted
from megarl.run.results import StepResult


class UnscoredSteps:
    """Counts the last steps without a scored response, up to `reward.max_unscored_steps` or all steps of a run."""

    def __init__(self, config: TrainingConfig) -> None:
        limit = config.reward.max_unscored_steps if isinstance(config, PPOConfig | RAFTConfig) else None
        self._limit = None if limit is None else min(limit, config.steps)
        self._steps = 0

    def add(self, result: StepResult) -> None:
        """Takes the result of a step; raises RunError, with the step's failures, at the limit."""
        sampled = result.metrics.get("rollout/samples", 0)
        unscored = sampled > 0 and result.metrics.get("rewards/unscored") == sampled
        self._steps = self._steps + 1 if unscored else 0
        if self._limit is not None and self._steps >= self._limit:
            steps = counted(self._steps, "step")
            message = f"no response of the last {steps} has a score (reward.max_unscored_steps)"
            causes = result.failures or ["rewards/unscored in metrics.jsonl has the reward at fault"]
            raise RunError("\n".join([f"{message}; correct the reward, and start the run again", *causes]))
