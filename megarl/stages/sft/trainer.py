"""Supervised fine-tuning of the role actor."""

from __future__ import annotations

from collections.abc import Callable

from megarl.cluster.session import Session
from megarl.loop.supervised import SupervisedTrainer
from megarl.preflight.datasets import Sets
from megarl.stages.sft.config import SFTConfig


class SFTTrainer(SupervisedTrainer):
    """Trains the actor on demonstrations."""

    def __init__(
        self, config: SFTConfig, session: Session, model_dir: str, data: Sets, phase: Callable[[str], None]
    ) -> None:
        super().__init__(
            config,
            session,
            model_dir,
            data,
            phase,
            evaluate_every=config.data.evaluate_every,
            all_tokens=config.data.loss_on == "all",
        )
