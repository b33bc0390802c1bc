"""Texts that the actor learns beside the rollouts, in the same optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from megarl.cluster.group import Texts
from megarl.cluster.session import Session
from megarl.config import PPOConfig
from megarl.data.batches import on_all_tokens, text_batch
from megarl.data.demonstrations import Demonstration
from megarl.data.schedule import step_schedule, under_one_length
from megarl.data.streams import Stream, StreamState
from megarl.types import Schedule


class TextMixture:
    """An endless stream of texts, some of which every optimizer step of the actor takes along.

    Args:
        config: of the run; it has ``ptx``.
        rows: the texts.
        session: where everything runs.
    """

    def __init__(self, config: PPOConfig, rows: Sequence[Demonstration], session: Session) -> None:
        assert config.ptx is not None
        self._settings, self._session = config.ptx, session
        self._layout, self._budget = config.layout("actor"), config.role("actor").tokens_per_micro_batch
        self._rows = Stream(rows, config.run.seed)

    def next(self, steps: Sequence[Schedule]) -> tuple[tuple[Schedule, ...], Texts]:
        """The next texts.

        Args:
            steps: the actor's optimizer steps that take them along.

        Returns:
            The same steps, each with packs as long as those of its texts, and the texts.
        """
        each = self._settings.sequences_per_mini_batch
        samples, chunks = text_batch(self._rows.next(each * len(steps)), self._layout.dp * len(steps))
        counted = on_all_tokens(samples) if self._settings.loss_on == "all" else samples
        lengthened: list[Schedule] = []
        along: list[Schedule] = []
        for index, own in enumerate(steps):
            texts = step_schedule(counted[index * each : (index + 1) * each], self._layout, self._budget)
            for schedules, schedule in zip((lengthened, along), under_one_length(own, texts), strict=True):
                schedules.append(schedule)
        return tuple(lengthened), Texts(schedules=along, chunks=self._session.share(chunks))

    def state(self) -> dict[str, Any]:
        """Where the stream stands."""
        return asdict(self._rows.state())

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from there."""
        self._rows.load(StreamState(**state))
