"""Supervised fine-tuning: the likelihood of demonstrated responses."""

from __future__ import annotations

from collections.abc import Callable

from megarl.cluster.session import Session
from megarl.config import SFTConfig
from megarl.loop.datasets import TextSets
from megarl.loop.directory import RunDirectory
from megarl.loop.supervised import Supervised, Task


class SFT(Supervised):
    """A run of supervised fine-tuning of the role actor.

    Args:
        config: of the run.
        session: where everything runs.
        directory: of the run.
        data: the demonstrations.
        phase: is told what the run does.
    """

    def __init__(
        self,
        config: SFTConfig,
        session: Session,
        directory: RunDirectory,
        data: TextSets,
        phase: Callable[[str], None],
    ) -> None:
        super().__init__(
            config,
            session,
            directory,
            phase,
            Task(
                role="actor",
                train=data.train,
                held_out=data.held_out,
                per_step=config.data.sequences_per_step,
                all_tokens=config.data.loss_on == "all",
            ),
        )
