"""Supervised fine-tuning: the configuration of a run."""

from __future__ import annotations

from typing import ClassVar, Literal

from megarl.config.schema.data import TextData
from megarl.config.schema.run import Actor, TrainingConfig
from megarl.types import RoleName


class SFTConfig(TrainingConfig):
    """A run of supervised fine-tuning of the role actor."""

    trained: ClassVar[tuple[RoleName, ...]] = ("actor",)

    stage: Literal["sft"]  # pyright: ignore[reportIncompatibleVariableOverride]  (frozen)
    """What the run does: supervised fine-tuning."""
    data: TextData
    """The demonstrations."""
    actor: Actor
    """The policy's training."""
