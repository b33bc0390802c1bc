"""The turns of conversations that an engine samples, handed out in batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from megarl.types import Pickled, RolloutChunk, SampledTurn, SampleInfo, SampleRequest, TurnAnswer, WorkItem

_HEARTBEAT_S = 5.0
"""A call for answers returns after this time, also without any, as long as the engine takes steps."""

Generated = Future[tuple[dict[int, RolloutChunk], list[SampleInfo]]]


class Turns:
    """Requests for turns, and their answers; all methods run in the thread of the engine.

    Args:
        generate: starts the responses of an item.
    """

    def __init__(self, generate: Callable[[WorkItem], Generated]) -> None:
        self._generate = generate
        self._answers: list[TurnAnswer] = []
        self._error: BaseException | None = None
        self._waiting: Future[list[TurnAnswer]] | None = None
        self._since = 0.0

    def start(self, requests: Sequence[tuple[int, Pickled[SampleRequest]]]) -> None:
        """Starts turns, each with its number."""
        for number, request in requests:
            generated = self._generate(WorkItem(chunk=0, requests=(request.value(),)))
            generated.add_done_callback(lambda done, number=number: self._add(number, done))

    def next(self) -> Future[list[TurnAnswer]]:
        """Returns the answers that no earlier call had, as soon as there are any; none for a heartbeat."""
        self._waiting = Future()
        self._since = time.monotonic()
        waiting = self._waiting
        if self._answers or self._error is not None:
            self._hand_out()
        return waiting

    def step(self) -> None:
        """Answers a waiting call with the turns that ended in a step of the engine, or because it has waited long."""
        late = time.monotonic() - self._since > _HEARTBEAT_S
        if self._answers or self._error is not None or late:
            self._hand_out()

    def _add(self, number: int, done: Generated) -> None:
        error = done.exception()
        if error is not None:
            self._error = error
        else:
            chunks, _ = done.result()
            turn = SampledTurn.of(chunks[0])
            tokens = len(turn.token_ids)
            self._answers.append(TurnAnswer(number=number, tokens=tokens, turn=Pickled.of(turn)))

    def _hand_out(self) -> None:
        if self._waiting is None:
            return
        waiting = self._waiting
        self._waiting = None
        if self._error is not None:
            waiting.set_exception(self._error)
            return
        answers = self._answers
        self._answers = []
        waiting.set_result(answers)
