"""One attempt at a weight sync; tolerates engines that die or hang."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from megarl.cluster.calls import Call, Condition, Process, WorkerError
from megarl.groups.engines import RolloutGroup
from megarl.resharding import BarrierWatch, SyncError
from megarl.rollout.engine import RolloutEngine


class SyncAttempt:
    """A call on the actor's ranks and calls on engines, by engine.

    Where engines may be replaced, one that dies or hangs ends the attempt, as the others get out of it.

    Args:
        watch: the barriers where all of them meet.
        ranks: the engine of each rank that is an engine's.
    """

    def __init__(
        self,
        engines: RolloutGroup,
        watch: BarrierWatch,
        ranks: Mapping[int, int],
        sent: Call[Any],
        received: Mapping[int, Call[Any]],
    ) -> None:
        self._engines = engines
        self._watch = watch
        self._ranks = ranks
        self._sent = sent
        self._received = received
        self.lost: set[int] = set()
        self._hung: set[int] = set()
        self._extended: set[int | None] = set()
        for call in (sent, *received.values()):
            call.tolerates = SyncError
        for call in received.values():
            call.beside = sent  # the ranks may have other calls before it
        if engines.replaceable:
            sent.late = partial(self._extend, None)
            for engine, call in received.items():
                call.late = partial(self._extend, engine)
                call.lost = partial(self._lose, engine, call.processes[0])

    def succeeds(self) -> bool:
        """Waits for all ranks; returns whether those that are left have done it.

        Raises:
            WorkerError: They have aborted it though no engine was lost, or a process failed.
        """
        self._engines.monitor.wait_until(Condition(lambda: self._finished))
        errors = [error for call in (self._sent, *self._received.values()) for error in call.errors.values()]
        if errors and not self.lost:
            first = min(self._ranks)
            raise WorkerError(
                f"{errors[0]}\nThe ranks of a sync are those of the actor's group, 0 to {first - 1}, and from {first} "
                f"on those of the engines, {len(self._ranks) // len(self._received)} of each."
            )
        return not errors

    @property
    def _finished(self) -> bool:
        left = (call for engine, call in self._received.items() if engine not in self.lost)
        return self._sent.finished and all(call.finished for call in left)

    def _lose(self, engine: int, process: Process[RolloutEngine], cause: str) -> None:
        """Replaces an engine, whose end breaks its connections, and frees those that wait for it in a barrier."""
        self.lost.add(engine)
        self._engines.replace(engine, process, cause)
        self._watch.abort(cause.splitlines()[0])

    def _extend(self, engine: int | None, message: str) -> bool:
        """Returns whether the actor's ranks, or an engine, are late because of another engine, which hangs.

        Raises:
            WorkerError: No engine is seen to hang, or they are late once more.
        """
        if not self._extended:
            self._hung = self._hanging()
        if not self._hung or engine in self._extended:
            raise WorkerError(message)
        self._extended.add(engine)
        return engine not in self._hung

    def _hanging(self) -> set[int]:
        """Returns the engines without a sign of life, and those that have not begun though all trainers have."""
        waiting = [engine for engine, call in self._received.items() if not call.finished and engine not in self.lost]
        hung = self._engines.silent(waiting)
        absent = self._watch.absent()
        if all(rank in self._ranks for rank in absent):
            hung |= {self._ranks[rank] for rank in absent}.intersection(waiting)
        return hung
