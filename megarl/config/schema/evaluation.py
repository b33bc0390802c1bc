"""Evaluation of a checkpoint by itself: the configuration of a run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megarl.config.schema.data import Fault, dropped
from megarl.config.schema.placement import Groups
from megarl.config.schema.reward import Evaluation, Reward
from megarl.config.schema.rollout import Rollout
from megarl.config.schema.run import Run, RunConfig


class HeldOut(Evaluation):
    """Held-out prompts, answered and scored, and how their rows are read."""

    chat_template: bool = False
    """Text prompts are what a user says: put them into the tokenizer's chat template. Chats always are."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """What becomes of rows that leave no room for the response: an error, or left out and counted."""

    @property
    def drop(self) -> frozenset[Fault]:
        """Faults of the rows that are left out."""
        return dropped(too_long=self.too_long)


class EvalConfig(RunConfig):
    """A run that answers held-out prompts with a checkpoint, and scores the answers."""

    stage: Literal["eval"]  # pyright: ignore[reportIncompatibleVariableOverride]  (frozen)
    """What the run does: evaluation."""
    run: Run
    """The run itself."""
    groups: Groups = Field(default={})  # pyright: ignore[reportIncompatibleVariableOverride]  (frozen)
    """Groups of devices by name, with the role reward where a reward model scores."""
    rollout: Rollout
    """Generation with vLLM, which reads the weights from the model's files."""
    evaluation: HeldOut
    """The prompts, and what is reported."""
    reward: Reward = Reward()
    """What scores a response beside the functions of the evaluation."""
